# What `cmake --install` puts where. The package can be moved: its CMake files name no folder of the machine it
# was built on, and find every dependency anew. (A shared libaccelerate.so also looks for LibTorch where it
# was built; a program that links both brings its own path.)
include(CMakePackageConfigHelpers)

set(_package "${CMAKE_INSTALL_LIBDIR}/cmake/accelerate")
install(TARGETS accelerate_base accelerate EXPORT accelerate-targets
  RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}"
  LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}"
  ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}")
install(EXPORT accelerate-targets NAMESPACE accelerate:: DESTINATION "${_package}")
install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/accelerate" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION "${CMAKE_INSTALL_DATADIR}/doc/accelerate")
# Shared libraries find each other, and the program finds them, wherever the tree is put.
set_target_properties(accelerate_base accelerate PROPERTIES INSTALL_RPATH "$ORIGIN")
if(TARGET accelerate_cli)
  install(TARGETS accelerate_cli RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}")
  file(RELATIVE_PATH _lib_from_bin "/${CMAKE_INSTALL_BINDIR}" "/${CMAKE_INSTALL_LIBDIR}")
  set_target_properties(accelerate_cli PROPERTIES INSTALL_RPATH "$ORIGIN/${_lib_from_bin}")
endif()

configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/accelerate-config.cmake.in"
  "${PROJECT_BINARY_DIR}/package/accelerate-config.cmake" INSTALL_DESTINATION "${_package}"
  NO_SET_AND_CHECK_MACRO NO_CHECK_REQUIRED_COMPONENTS_MACRO)
write_basic_package_version_file("${PROJECT_BINARY_DIR}/package/accelerate-config-version.cmake"
  COMPATIBILITY SameMinorVersion)
install(FILES
  "${PROJECT_BINARY_DIR}/package/accelerate-config.cmake"
  "${PROJECT_BINARY_DIR}/package/accelerate-config-version.cmake"
  "${PROJECT_SOURCE_DIR}/cmake/FindLibTorch.cmake"
  "${PROJECT_SOURCE_DIR}/cmake/FindMpiC.cmake"
  "${PROJECT_SOURCE_DIR}/cmake/FindLibUring.cmake"
  DESTINATION "${_package}")
