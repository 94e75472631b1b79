# Builds and runs the project PROJECT against this one, as its user would.
#   find_package:      after installing into a folder and moving that folder elsewhere
#   add_subdirectory:  from the source tree
#   torch_versions:    that find_package refuses a LibTorch it was not built with
# -D SOURCE=... BINARY=... LIBTORCH=... CXX=... CCACHE=... GENERATOR=... WORK=... PROJECT=...

function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE code OUTPUT_VARIABLE output ERROR_VARIABLE output)
  message("${output}")
  if(NOT code EQUAL 0)
    file(REMOVE_RECURSE "${WORK}")
    list(JOIN ARGN " " line)
    message(FATAL_ERROR "exit code ${code} from: ${line}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

# No CUDA compiler within reach: a user with a CUDA LibTorch and no toolkit must get through.
string(REPLACE ":" ";" folders "$ENV{PATH}")
set(path "")
foreach(folder IN LISTS folders)
  if(NOT EXISTS "${folder}/nvcc")
    list(APPEND path "${folder}")
  endif()
endforeach()
list(JOIN path ":" path)
set(ENV{PATH} "${path}")
unset(ENV{CUDA_HOME})
unset(ENV{CUDA_PATH})
# One compilation serves every folder it is built in.
set(ENV{CCACHE_NOHASHDIR} 1)
unset(ENV{CCACHE_BASEDIR})

file(REMOVE_RECURSE "${WORK}")
set(arguments -G "${GENERATOR}" "-DCMAKE_CXX_COMPILER=${CXX}" "-DCMAKE_CXX_COMPILER_LAUNCHER=${CCACHE}" -DCMAKE_BUILD_TYPE=RelWithDebInfo)
set(project_folder "${SOURCE}/tests/package/${PROJECT}")
set(prefix "${LIBTORCH}")

if(NOT PROJECT STREQUAL "add_subdirectory")
  run("${CMAKE_COMMAND}" --install "${BINARY}" --prefix "${WORK}/installed")
  file(RENAME "${WORK}/installed" "${WORK}/moved")
  list(APPEND prefix "${WORK}/moved")
  file(GLOB_RECURSE cmake_files "${WORK}/moved/*.cmake")
  foreach(file IN LISTS cmake_files)
    file(READ "${file}" content)
    foreach(folder "${SOURCE}" "${BINARY}" "${LIBTORCH}" "${WORK}")
      string(FIND "${content}" "${folder}" at)
      if(NOT at EQUAL -1)
        message(FATAL_ERROR "${file} names ${folder}: the package cannot be moved to another machine")
      endif()
    endforeach()
  endforeach()
  run("${WORK}/moved/bin/accelerate-cpp" --version)
endif()

if(PROJECT STREQUAL "torch_versions")
  set(project_folder "${SOURCE}/tests/package/find_package")
  # A LibTorch that differs in its version alone.
  file(MAKE_DIRECTORY "${WORK}/torch/include/torch/headeronly" "${WORK}/torch/include/torch/csrc/api/include/torch" "${WORK}/torch/lib")
  file(WRITE "${WORK}/torch/include/torch/csrc/api/include/torch/version.h" "")
  file(WRITE "${WORK}/torch/include/torch/headeronly/version.h" "#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 4\n#define TORCH_VERSION_PATCH 1\n")
  execute_process(
    COMMAND "${CMAKE_COMMAND}" -S "${project_folder}" -B "${WORK}/build" ${arguments} "-DCMAKE_PREFIX_PATH=${WORK}/torch;${WORK}/moved"
    RESULT_VARIABLE code OUTPUT_VARIABLE output ERROR_VARIABLE output)
  string(REGEX REPLACE "[ \n]+" " " output "${output}")
  if(code EQUAL 0 OR NOT output MATCHES "was built with LibTorch [0-9.]+, and .* holds 2\\.4\\.1\\.")
    message(FATAL_ERROR "LibTorch 2.4.1 was to be refused with the reason, and this came (exit code ${code}): ${output}")
  endif()
else()
  list(JOIN prefix "\\;" prefix)  # One argument, though it is a list.
  run("${CMAKE_COMMAND}" -S "${project_folder}" -B "${WORK}/build" ${arguments} "-DCMAKE_PREFIX_PATH=${prefix}")
  if(EXISTS "${WORK}/build/CMakeFiles/CMakeCCompiler.cmake")
    message(FATAL_ERROR "The project asked for C++ alone, and C was enabled.")
  endif()
  run("${CMAKE_COMMAND}" --build "${WORK}/build" --target app)
  run("${WORK}/build/app")
endif()
file(REMOVE_RECURSE "${WORK}")
