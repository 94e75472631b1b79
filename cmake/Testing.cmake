# The interpreter that LibTorch came with: tests compare with Python where it has the same thing.
set(ACCELERATE_TEST_PYTHON "")
if(LibTorch_SITE_PACKAGES)
  get_filename_component(ACCELERATE_TEST_PYTHON "${LibTorch_SITE_PACKAGES}/../../../bin/python3" ABSOLUTE)
endif()

# accelerate_add_test(NAME SOURCES a_test.cpp ... [BASE] [LABELS ...])
#   One test program of GoogleTest cases that runs in one process. BASE: it uses no torch.
function(accelerate_add_test name)
  cmake_parse_arguments(arg "BASE" "" "SOURCES;LABELS" ${ARGN})
  add_executable(${name} ${arg_SOURCES})
  accelerate_compile_settings(${name})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/tests ${PROJECT_SOURCE_DIR}/src)
  if(arg_BASE)
    target_link_libraries(${name} PRIVATE accelerate::base GTest::gtest_main)
  else()
    target_link_libraries(${name} PRIVATE accelerate::accelerate GTest::gtest_main)
  endif()
  target_compile_definitions(${name} PRIVATE ACCELERATE_TEST_PYTHON="${ACCELERATE_TEST_PYTHON}"
    ACCELERATE_TESTS_DIR="${PROJECT_SOURCE_DIR}/tests")
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES LABELS "${arg_LABELS}" TIMEOUT 600
    ENVIRONMENT "OMP_NUM_THREADS=1")
endfunction()
