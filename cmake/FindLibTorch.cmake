# Finds LibTorch without asking it to find CUDA.
#
# LibTorch's own TorchConfig.cmake wants a CUDA toolkit and a GPU to look at, even to build code that
# runs on the CPU. Everything a C++ program needs is in the wheel (or the libtorch archive), so this
# module makes one imported target from it:
#
#   accelerate::libtorch   headers, definitions and libraries of LibTorch
#
# It looks, in this order, at Torch_DIR, at CMAKE_PREFIX_PATH, and at the Python interpreters of the
# project's .venv, of VIRTUAL_ENV and of PATH. It sets LibTorch_VERSION, LibTorch_ROOT,
# LibTorch_HAS_CUDA, and LibTorch_SITE_PACKAGES (empty unless LibTorch lies in a Python environment).

if(TARGET accelerate::libtorch)
  set(LibTorch_FOUND TRUE)
  return()
endif()

function(_libtorch_root_from_python python result)
  set(${result} "" PARENT_SCOPE)
  if(NOT EXISTS "${python}")
    return()
  endif()
  # find_spec does not import torch, which would take seconds.
  execute_process(
    COMMAND "${python}" -c
      "import importlib.util, pathlib; s = importlib.util.find_spec('torch'); print(pathlib.Path(s.origin).parent if s else '')"
    OUTPUT_VARIABLE _root OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(_root AND EXISTS "${_root}/include/torch/csrc/api/include/torch/version.h")
    set(${result} "${_root}" PARENT_SCOPE)
  endif()
endfunction()

set(_libtorch_header include/torch/csrc/api/include/torch/version.h)
set(LibTorch_ROOT "")
if(DEFINED Torch_DIR OR DEFINED ENV{Torch_DIR})
  set(_torch_dir "${Torch_DIR}")
  if(NOT _torch_dir)
    set(_torch_dir "$ENV{Torch_DIR}")
  endif()
  get_filename_component(LibTorch_ROOT "${_torch_dir}/../../.." ABSOLUTE)
endif()
if(NOT EXISTS "${LibTorch_ROOT}/${_libtorch_header}")
  set(LibTorch_ROOT "")
  set(_prefixes ${CMAKE_PREFIX_PATH})
  if(DEFINED ENV{CMAKE_PREFIX_PATH})
    string(REPLACE ":" ";" _env_prefixes "$ENV{CMAKE_PREFIX_PATH}")
    list(APPEND _prefixes ${_env_prefixes})
  endif()
  foreach(_prefix IN LISTS _prefixes)
    # A prefix may be the root itself or torch.utils.cmake_prefix_path (root/share/cmake).
    foreach(_candidate "${_prefix}" "${_prefix}/../.." "${_prefix}/torch")
      get_filename_component(_candidate "${_candidate}" ABSOLUTE)
      if(NOT LibTorch_ROOT AND EXISTS "${_candidate}/${_libtorch_header}")
        set(LibTorch_ROOT "${_candidate}")
      endif()
    endforeach()
  endforeach()
endif()
if(NOT LibTorch_ROOT)
  find_program(_libtorch_python NAMES python3 python NO_CACHE)
  foreach(_python "${PROJECT_SOURCE_DIR}/.venv/bin/python" "$ENV{VIRTUAL_ENV}/bin/python" "${_libtorch_python}")
    if(NOT LibTorch_ROOT)
      _libtorch_root_from_python("${_python}" LibTorch_ROOT)
    endif()
  endforeach()
endif()

set(LibTorch_VERSION "")
if(LibTorch_ROOT)
  set(_version_header "${LibTorch_ROOT}/include/torch/headeronly/version.h")
  if(NOT EXISTS "${_version_header}")  # LibTorch before 2.9
    set(_version_header "${LibTorch_ROOT}/${_libtorch_header}")
  endif()
  file(STRINGS "${_version_header}" _lines REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH)")
  string(REGEX MATCHALL "[0-9]+" _parts "${_lines}")
  list(JOIN _parts "." LibTorch_VERSION)
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(LibTorch
  REQUIRED_VARS LibTorch_ROOT
  VERSION_VAR LibTorch_VERSION
  REASON_FAILURE_MESSAGE
    "No LibTorch was found. Install the Python wheel (python3 -m venv .venv && .venv/bin/pip install torch==2.11.0) or name an existing one with -DCMAKE_PREFIX_PATH=/path/to/torch.")
if(NOT LibTorch_FOUND)
  return()
endif()

set(LibTorch_HAS_CUDA FALSE)
if(EXISTS "${LibTorch_ROOT}/lib/libtorch_cuda.so")
  set(LibTorch_HAS_CUDA TRUE)
endif()
get_filename_component(LibTorch_SITE_PACKAGES "${LibTorch_ROOT}/.." ABSOLUTE)
if(NOT EXISTS "${LibTorch_SITE_PACKAGES}/torch/version.py")
  set(LibTorch_SITE_PACKAGES "")
endif()

add_library(accelerate::libtorch INTERFACE IMPORTED GLOBAL)
set_target_properties(accelerate::libtorch PROPERTIES
  INTERFACE_INCLUDE_DIRECTORIES "${LibTorch_ROOT}/include;${LibTorch_ROOT}/include/torch/csrc/api/include"
  INTERFACE_COMPILE_DEFINITIONS "USE_DISTRIBUTED;USE_C10D_GLOO")
# libtorch.so exports a std::filesystem of its own, part of which crashes (remove_all). Whoever comes
# first is used, so the C++ library has to come before it.
set_property(TARGET accelerate::libtorch APPEND PROPERTY INTERFACE_LINK_OPTIONS
  "LINKER:--push-state,--no-as-needed,-lstdc++,--pop-state")
set(_libtorch_libraries "${LibTorch_ROOT}/lib/libtorch.so" "${LibTorch_ROOT}/lib/libtorch_cpu.so" "${LibTorch_ROOT}/lib/libc10.so")
if(LibTorch_HAS_CUDA)
  # Nothing names a symbol of these, and their registrations are what makes CUDA tensors work.
  set_property(TARGET accelerate::libtorch APPEND PROPERTY INTERFACE_LINK_OPTIONS
    "LINKER:--no-as-needed,${LibTorch_ROOT}/lib/libtorch_cuda.so,${LibTorch_ROOT}/lib/libc10_cuda.so,--as-needed")
  # The wheel's CUDA headers serve where no toolkit is installed.
  foreach(_include "${LibTorch_SITE_PACKAGES}/nvidia/cu13/include" "/usr/local/cuda/include")
    if(NOT LibTorch_CUDA_INCLUDE AND EXISTS "${_include}/cuda_runtime_api.h")
      set(LibTorch_CUDA_INCLUDE "${_include}")
    endif()
  endforeach()
endif()
set_property(TARGET accelerate::libtorch APPEND PROPERTY INTERFACE_LINK_LIBRARIES ${_libtorch_libraries})
set_property(TARGET accelerate::libtorch APPEND PROPERTY INTERFACE_LINK_OPTIONS "LINKER:-rpath,${LibTorch_ROOT}/lib")
