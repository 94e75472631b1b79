# How every target of this project is compiled.

if(PROJECT_IS_TOP_LEVEL)
  if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
    set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "Debug, Release, RelWithDebInfo or MinSizeRel" FORCE)
  endif()
  find_program(ACCELERATE_CCACHE ccache DOC "A compiler cache; set to empty to do without")
  mark_as_advanced(ACCELERATE_CCACHE)
  if(ACCELERATE_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
    set(CMAKE_CXX_COMPILER_LAUNCHER "${ACCELERATE_CCACHE}")
  endif()
  if(ACCELERATE_SANITIZE)
    add_compile_options(-fsanitize=${ACCELERATE_SANITIZE} -fno-omit-frame-pointer)
    add_link_options(-fsanitize=${ACCELERATE_SANITIZE})
  endif()
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
