# Whether the NCCL backend can be built with this LibTorch. c10d's NCCL header reaches far into CUDA's headers, of which a
# LibTorch without an installed toolkit may have only a part, so the backend itself is compiled once.
#
# accelerate_probe_nccl(VARIABLE): sets VARIABLE to the reason why it cannot be built, or to nothing. Sets
# ACCELERATE_NCCL_INCLUDE to the folder of nccl.h.
function(accelerate_probe_nccl reason)
  find_path(ACCELERATE_NCCL_INCLUDE nccl.h HINTS "${LibTorch_SITE_PACKAGES}/nvidia/nccl/include" "${LibTorch_CUDA_INCLUDE}")
  mark_as_advanced(ACCELERATE_NCCL_INCLUDE)
  set(${reason} "" PARENT_SCOPE)
  if(NOT LibTorch_HAS_CUDA)
    set(${reason} "the LibTorch in ${LibTorch_ROOT} has no CUDA" PARENT_SCOPE)
    return()
  elseif(NOT LibTorch_CUDA_INCLUDE)
    set(${reason} "cuda_runtime_api.h is neither beside LibTorch nor in /usr/local/cuda" PARENT_SCOPE)
    return()
  elseif(NOT ACCELERATE_NCCL_INCLUDE)
    set(${reason} "nccl.h was not found" PARENT_SCOPE)
    return()
  endif()
  # What the answer depends on. A yes is kept, so that it is asked once; a no is asked again, in case headers came.
  set(question "${CMAKE_CXX_COMPILER};${LibTorch_ROOT};${LibTorch_VERSION};${LibTorch_CUDA_INCLUDE};${ACCELERATE_NCCL_INCLUDE}")
  if("${ACCELERATE_NCCL_COMPILES}" STREQUAL "${question}")
    return()
  endif()
  message(STATUS "Compiling the NCCL backend once, to see whether it can be built")
  set(folders "${PROJECT_SOURCE_DIR}/src" "${PROJECT_SOURCE_DIR}/include" "${ACCELERATE_NCCL_INCLUDE}" "${LibTorch_CUDA_INCLUDE}"
    "${LibTorch_ROOT}/include" "${LibTorch_ROOT}/include/torch/csrc/api/include")
  list(TRANSFORM folders PREPEND "-isystem")
  execute_process(
    COMMAND ${CMAKE_CXX_COMPILER_LAUNCHER} "${CMAKE_CXX_COMPILER}" -std=c++20 -O0 -DUSE_DISTRIBUTED -DUSE_C10D_GLOO -DUSE_C10D_NCCL
      ${folders} -c "${PROJECT_SOURCE_DIR}/src/comm/nccl_backend.cpp" -o "${PROJECT_BINARY_DIR}/nccl_probe.o"
    RESULT_VARIABLE code OUTPUT_QUIET ERROR_VARIABLE errors)
  if(code EQUAL 0)
    set(ACCELERATE_NCCL_COMPILES "${question}" CACHE INTERNAL "With what the NCCL backend was seen to compile")
  else()
    string(REGEX MATCH "[^\n]*error[^\n]*" line "${errors}")
    set(${reason} "its source does not compile with this LibTorch and these CUDA headers (${line}). The wheels nvidia-cuda-crt and nvidia-cuda-cccl of torch's CUDA version, or an installed CUDA toolkit, bring headers that torch's own wheel lacks" PARENT_SCOPE)
  endif()
endfunction()
