# Every dependency, in one place. LibTorch has its own finder because its CMake package asks for a
# CUDA toolkit and a GPU (see FindLibTorch.cmake).

set(ACCELERATE_TESTED_TORCH 2.11)
find_package(LibTorch MODULE REQUIRED)
if(NOT LibTorch_VERSION MATCHES "^2\\.11\\.")
  message(WARNING
    "Found LibTorch ${LibTorch_VERSION} in ${LibTorch_ROOT}; accelerate-cpp ${PROJECT_VERSION} was tested with "
    "${ACCELERATE_TESTED_TORCH}. LibTorch promises no stable C++ interface between minor versions: expect compile errors, "
    "and run the tests before you trust the result. To get the tested one: pip install torch==2.11.0.")
endif()

# A project that takes this one in with add_subdirectory links our targets from another folder.
set(CMAKE_FIND_PACKAGE_TARGETS_GLOBAL TRUE)
find_package(Threads REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(spdlog REQUIRED)
# xxHash: its header alone, compiled into the library, so that nothing needs to be linked.
find_path(ACCELERATE_XXHASH_INCLUDE xxhash.h)
if(NOT ACCELERATE_XXHASH_INCLUDE)
  message(FATAL_ERROR "xxhash.h was not found, which the checksums of checkpoints need. Install libxxhash-dev (xxhash-devel, xxhash), or name its folder with -DACCELERATE_XXHASH_INCLUDE=/path/to/include.")
endif()
mark_as_advanced(ACCELERATE_XXHASH_INCLUDE)

# MPI: used for its C interface only.
set(ACCELERATE_HAVE_MPI OFF)
if(NOT ACCELERATE_WITH_MPI STREQUAL "OFF")
  find_package(MpiC MODULE QUIET)
  if(MpiC_FOUND)
    set(ACCELERATE_HAVE_MPI ON)
  elseif(ACCELERATE_WITH_MPI STREQUAL "ON")
    message(FATAL_ERROR "ACCELERATE_WITH_MPI is ON and no MPI was found. Install libopenmpi-dev, or configure with -DACCELERATE_WITH_MPI=OFF.")
  endif()
endif()

# NCCL: the wheel's own copy, whose headers lie beside it.
set(ACCELERATE_HAVE_NCCL OFF)
set(ACCELERATE_NCCL_MISSING "it was configured with -DACCELERATE_WITH_NCCL=OFF")
if(NOT ACCELERATE_WITH_NCCL STREQUAL "OFF")
  include(NcclProbe)
  accelerate_probe_nccl(ACCELERATE_NCCL_MISSING)
  if(NOT ACCELERATE_NCCL_MISSING)
    set(ACCELERATE_HAVE_NCCL ON)
  elseif(ACCELERATE_WITH_NCCL STREQUAL "ON")
    message(FATAL_ERROR "ACCELERATE_WITH_NCCL is ON, and there is no NCCL backend to build: ${ACCELERATE_NCCL_MISSING}. Use the CUDA wheel of torch with tools/setup, or configure with -DACCELERATE_WITH_NCCL=OFF.")
  endif()
endif()
# io_uring: files are read and written by threads without it, or where the system forbids it.
set(ACCELERATE_HAVE_IO_URING OFF)
if(NOT ACCELERATE_WITH_IO_URING STREQUAL "OFF")
  find_package(LibUring MODULE QUIET)
  if(LibUring_FOUND)
    set(ACCELERATE_HAVE_IO_URING ON)
  elseif(ACCELERATE_WITH_IO_URING STREQUAL "ON")
    message(FATAL_ERROR "ACCELERATE_WITH_IO_URING is ON and no liburing was found. Install liburing-dev, or configure with -DACCELERATE_WITH_IO_URING=OFF.")
  endif()
endif()
message(STATUS "accelerate: LibTorch ${LibTorch_VERSION} (${LibTorch_ROOT}), CUDA ${LibTorch_HAS_CUDA}, NCCL ${ACCELERATE_HAVE_NCCL}, MPI ${ACCELERATE_HAVE_MPI}, io_uring ${ACCELERATE_HAVE_IO_URING}")
if(LibTorch_HAS_CUDA AND NOT ACCELERATE_HAVE_NCCL)
  message(STATUS "accelerate: there is no NCCL backend: ${ACCELERATE_NCCL_MISSING}")
endif()
