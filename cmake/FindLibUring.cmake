# Finds liburing, which Linux's io_uring is used through (Debian: liburing-dev).
#
#   accelerate::uring   header and library

if(TARGET accelerate::uring)
  set(LibUring_FOUND TRUE)
  return()
endif()
find_path(LibUring_INCLUDE_DIR liburing.h)
find_library(LibUring_LIBRARY NAMES uring)
mark_as_advanced(LibUring_INCLUDE_DIR LibUring_LIBRARY)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(LibUring REQUIRED_VARS LibUring_LIBRARY LibUring_INCLUDE_DIR)
if(LibUring_FOUND)
  add_library(accelerate::uring UNKNOWN IMPORTED GLOBAL)
  set_target_properties(accelerate::uring PROPERTIES
    IMPORTED_LOCATION "${LibUring_LIBRARY}" INTERFACE_INCLUDE_DIRECTORIES "${LibUring_INCLUDE_DIR}")
endif()
