# Tests compare with Python where it has the same thing: the first interpreter that has torch and accelerate.
set(ACCELERATE_TEST_PYTHON "")
foreach(_python "${PROJECT_SOURCE_DIR}/.venv/bin/python3" "${LibTorch_SITE_PACKAGES}/../../../bin/python3")
  if(NOT ACCELERATE_TEST_PYTHON AND EXISTS "${_python}")
    execute_process(COMMAND "${_python}" -c "import importlib.util as u, sys; sys.exit(not (u.find_spec('torch') and u.find_spec('accelerate')))"
      RESULT_VARIABLE _lacks ERROR_QUIET)
    if(NOT _lacks)
      set(ACCELERATE_TEST_PYTHON "${_python}")
    endif()
  endif()
endforeach()
if(NOT ACCELERATE_TEST_PYTHON)
  message(WARNING "No Python with torch and accelerate was found in .venv or beside LibTorch. The tests that compare with it will fail; tools/setup --tests installs it.")
endif()

# How to start N processes under MPI: OpenMPI wants to be told that root, and more ranks than cores, are meant.
set(ACCELERATE_MPIEXEC "${MPIEXEC_EXECUTABLE}")
if(MPIEXEC_EXECUTABLE)
  execute_process(COMMAND "${MPIEXEC_EXECUTABLE}" --version OUTPUT_VARIABLE _mpi_version ERROR_QUIET)
  if(_mpi_version MATCHES "Open MPI|OpenRTE")
    list(APPEND ACCELERATE_MPIEXEC --allow-run-as-root --oversubscribe)
  endif()
endif()

# LibTorch's headers take most of a test's compile time, so they are compiled once. Only the tests: in the library and
# its examples it would hide that a file does not include what it uses.
add_executable(accelerate_test_headers EXCLUDE_FROM_ALL ${PROJECT_SOURCE_DIR}/tests/support/headers_main.cpp)
accelerate_compile_settings(accelerate_test_headers)
target_link_libraries(accelerate_test_headers PRIVATE accelerate::accelerate GTest::gtest)
target_precompile_headers(accelerate_test_headers PRIVATE <torch/torch.h> <gtest/gtest.h> <nlohmann/json.hpp>)

# How tests are compiled: they are compiled more than run.
function(accelerate_test_settings name)
  target_compile_options(${name} PRIVATE -O0 -g0)
endfunction()
accelerate_test_settings(accelerate_test_headers)

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
    target_precompile_headers(${name} REUSE_FROM accelerate_test_headers)
  endif()
  accelerate_test_settings(${name})
  target_compile_definitions(${name} PRIVATE ACCELERATE_TEST_PYTHON="${ACCELERATE_TEST_PYTHON}"
    ACCELERATE_TESTS_DIR="${PROJECT_SOURCE_DIR}/tests")
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES LABELS "${arg_LABELS}" TIMEOUT 600
    ENVIRONMENT "OMP_NUM_THREADS=1")
endfunction()

# accelerate_add_distributed_test(NAME SOURCES a_test.cpp ... RANKS 2 4 BACKENDS gloo mpi [ANY_DEVICE] [LABELS ...])
#   One test program of GoogleTest cases that every rank runs, started once for each number of ranks
#   and backend. gloo: by this project's launcher; mpi: by mpirun, where MPI was found. On the CPU,
#   unless ANY_DEVICE is given.
function(accelerate_add_distributed_test name)
  cmake_parse_arguments(arg "ANY_DEVICE" "" "SOURCES;RANKS;BACKENDS;LABELS" ${ARGN})
  add_executable(${name} ${arg_SOURCES} $<TARGET_OBJECTS:accelerate_distributed_main>)
  accelerate_compile_settings(${name})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/tests ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(${name} PRIVATE accelerate::accelerate GTest::gtest GTest::gmock)
  accelerate_test_settings(${name})
  target_precompile_headers(${name} REUSE_FROM accelerate_test_headers)
  add_dependencies(${name} accelerate_cli)
  set(device "ACCELERATE_USE_CPU=1")
  if(arg_ANY_DEVICE)
    set(device "ACCELERATE_USE_CPU=0")
  endif()
  foreach(backend ${arg_BACKENDS})
    foreach(ranks ${arg_RANKS})
      set(test ${name}.${backend}.${ranks}ranks)
      if(backend STREQUAL "mpi")
        if(NOT ACCELERATE_HAVE_MPI OR NOT MPIEXEC_EXECUTABLE)
          continue()
        endif()
        add_test(NAME ${test} COMMAND ${ACCELERATE_MPIEXEC} -n ${ranks} $<TARGET_FILE:${name}>)
      else()
        add_test(NAME ${test} COMMAND accelerate_cli launch -n ${ranks} $<TARGET_FILE:${name}>)
      endif()
      set_tests_properties(${test} PROPERTIES LABELS "distributed;${backend};${arg_LABELS}" TIMEOUT 300 PROCESSORS ${ranks}
        ENVIRONMENT "OMP_NUM_THREADS=1;ACCELERATE_BACKEND=${backend};ACCELERATE_TIMEOUT=120;${device}")
    endforeach()
  endforeach()
endfunction()
