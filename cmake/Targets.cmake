# How every target of this project is compiled.

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "" FORCE)
endif()
# -g1 keeps line numbers in backtraces at a third of the compile and link cost of -g.
set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O2 -g1 -DNDEBUG")

function(accelerate_compile_settings target)
  target_compile_features(${target} PUBLIC cxx_std_20)
  set_target_properties(${target} PROPERTIES CXX_EXTENSIONS OFF POSITION_INDEPENDENT_CODE ON)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wno-unused-parameter -Wno-missing-field-initializers
    $<$<BOOL:${ACCELERATE_WERROR}>:-Werror>)
endfunction()

# accelerate_add_program(NAME SOURCES ...): a program that uses the whole library.
function(accelerate_add_program name)
  cmake_parse_arguments(arg "" "" "SOURCES" ${ARGN})
  add_executable(${name} ${arg_SOURCES})
  accelerate_compile_settings(${name})
  target_link_libraries(${name} PRIVATE accelerate::accelerate)
endfunction()
