# NVSHMEM 3.4.5 or later of version 3: headers, the device library and the host library.
#
# Looked for in NVSHMEM_HOME (a CMake variable, else the environment), which is the folder with
# include/ and lib/; else in the wheel nvidia-nvshmem-cu13 of build/venv, which
# scripts/python_env.sh --nvshmem installs, or of the Python interpreter that is found.
#
# Makes NVSHMEM::device (with the headers) and NVSHMEM::host; sets NVSHMEM_FOUND, NVSHMEM_VERSION and
# NVSHMEM_LIBRARY_DIR.

set(_nvshmem_places ${NVSHMEM_HOME} $ENV{NVSHMEM_HOME})
foreach(_python IN ITEMS ${PROJECT_SOURCE_DIR}/build/venv/bin/python python3)
  execute_process(
    COMMAND ${_python} -c "import nvidia.nvshmem as n; print(list(n.__path__)[0])"
    OUTPUT_VARIABLE _nvshmem_wheel OUTPUT_STRIP_TRAILING_WHITESPACE
    RESULT_VARIABLE _nvshmem_status ERROR_QUIET)
  if(_nvshmem_status EQUAL 0)
    list(APPEND _nvshmem_places ${_nvshmem_wheel})
  endif()
endforeach()

find_path(NVSHMEM_INCLUDE_DIR nvshmem.h HINTS ${_nvshmem_places} PATH_SUFFIXES include)
find_library(NVSHMEM_DEVICE_LIBRARY nvshmem_device HINTS ${_nvshmem_places} PATH_SUFFIXES lib)
find_library(NVSHMEM_HOST_LIBRARY NAMES libnvshmem_host.so.3 HINTS ${_nvshmem_places}
             PATH_SUFFIXES lib)

if(NVSHMEM_INCLUDE_DIR)
  file(STRINGS ${NVSHMEM_INCLUDE_DIR}/non_abi/nvshmem_version.h _nvshmem_lines
       REGEX "NVSHMEM_VENDOR_(MAJOR|MINOR|PATCH)_VERSION [0-9]+")
  string(REGEX MATCHALL "VERSION [0-9]+" _nvshmem_numbers "${_nvshmem_lines}")
  string(REPLACE "VERSION " "" _nvshmem_numbers "${_nvshmem_numbers}")
  string(REPLACE ";" "." NVSHMEM_VERSION "${_nvshmem_numbers}")
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  NVSHMEM
  REQUIRED_VARS NVSHMEM_HOST_LIBRARY NVSHMEM_DEVICE_LIBRARY NVSHMEM_INCLUDE_DIR
  VERSION_VAR NVSHMEM_VERSION
  REASON_FAILURE_MESSAGE
    "set NVSHMEM_HOME to its folder, or run scripts/python_env.sh --nvshmem (the PyPI package nvidia-nvshmem-cu13==3.4.5)"
)

if(NVSHMEM_FOUND AND NOT TARGET NVSHMEM::device)
  cmake_path(GET NVSHMEM_HOST_LIBRARY PARENT_PATH NVSHMEM_LIBRARY_DIR)
  add_library(NVSHMEM::host SHARED IMPORTED)
  set_target_properties(NVSHMEM::host PROPERTIES IMPORTED_LOCATION ${NVSHMEM_HOST_LIBRARY}
                                                 IMPORTED_SONAME libnvshmem_host.so.3)
  add_library(NVSHMEM::device STATIC IMPORTED)
  set_target_properties(
    NVSHMEM::device PROPERTIES IMPORTED_LOCATION ${NVSHMEM_DEVICE_LIBRARY}
                               INTERFACE_INCLUDE_DIRECTORIES ${NVSHMEM_INCLUDE_DIR})
endif()
mark_as_advanced(NVSHMEM_INCLUDE_DIR NVSHMEM_DEVICE_LIBRARY NVSHMEM_HOST_LIBRARY)
