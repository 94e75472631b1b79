# Finds MPI's C interface without enabling the C language, which CMake's own FindMPI needs for it: a
# program that uses this library should get by with `project(app LANGUAGES CXX)`.
#
#   accelerate::mpi      headers and library of MPI
#   MPIEXEC_EXECUTABLE   what starts a program under it, if found
#
# The compiler wrapper `mpicc` is asked where they are (OpenMPI, MPICH and Intel MPI all answer to
# -show with a command line); without one the usual folders are searched.

if(TARGET accelerate::mpi)
  set(MpiC_FOUND TRUE)
  return()
endif()

find_program(MpiC_COMPILER NAMES mpicc mpicc.openmpi mpicc.mpich DOC "MPI's compiler wrapper, asked for its include and library folders")
mark_as_advanced(MpiC_COMPILER)
set(_mpic_includes "")
set(_mpic_folders "")
set(_mpic_names "")
if(MpiC_COMPILER)
  execute_process(COMMAND "${MpiC_COMPILER}" -show OUTPUT_VARIABLE _mpic_line ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
  separate_arguments(_mpic_words UNIX_COMMAND "${_mpic_line}")
  foreach(_word IN LISTS _mpic_words)
    if(_word MATCHES "^-I(.+)$")
      list(APPEND _mpic_includes "${CMAKE_MATCH_1}")
    elseif(_word MATCHES "^-L(.+)$")
      list(APPEND _mpic_folders "${CMAKE_MATCH_1}")
    elseif(_word MATCHES "^-l(mpi|mpich|mpi_ibm)$")
      list(APPEND _mpic_names "${CMAKE_MATCH_1}")
    endif()
  endforeach()
endif()
find_path(MpiC_INCLUDE_DIR mpi.h HINTS ${_mpic_includes} PATH_SUFFIXES openmpi mpich mpi)
find_library(MpiC_LIBRARY NAMES ${_mpic_names} mpi mpich HINTS ${_mpic_folders} PATH_SUFFIXES openmpi/lib mpich/lib)
find_program(MPIEXEC_EXECUTABLE NAMES mpiexec mpirun DOC "Starts programs under MPI")
mark_as_advanced(MpiC_INCLUDE_DIR MpiC_LIBRARY MPIEXEC_EXECUTABLE)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(MpiC REQUIRED_VARS MpiC_LIBRARY MpiC_INCLUDE_DIR)
if(MpiC_FOUND)
  # OpenMPI keeps headers in a second folder inside the first one, so take all that the wrapper names.
  list(APPEND _mpic_includes "${MpiC_INCLUDE_DIR}")
  list(REMOVE_DUPLICATES _mpic_includes)
  add_library(accelerate::mpi UNKNOWN IMPORTED GLOBAL)
  set_target_properties(accelerate::mpi PROPERTIES
    IMPORTED_LOCATION "${MpiC_LIBRARY}" INTERFACE_INCLUDE_DIRECTORIES "${_mpic_includes}")
endif()
