# WAYBILL_CUDA=AUTO, as pip builds: with CUDA 13 where it is. Sets WAYBILL_CUDA and, where it is ON,
# CMAKE_CUDA_COMPILER for the caller, and says what was found.
macro(waybill_find_cuda)
  waybill_find_nvcc(waybill_nvcc waybill_nvcc_version)
  if(waybill_nvcc)
    set(WAYBILL_CUDA ON)
    if(NOT CMAKE_CUDA_COMPILER)
      set(CMAKE_CUDA_COMPILER ${waybill_nvcc})
    endif()
    message(NOTICE "waybill: CUDA ${waybill_nvcc_version} is at ${waybill_nvcc}: building for GPUs too. "
                   "WAYBILL_CUDA=OFF leaves them out (SKBUILD_CMAKE_DEFINE=WAYBILL_CUDA=OFF pip install .)")
  else()
    set(WAYBILL_CUDA OFF)
    message(NOTICE "waybill: found no CUDA 13 (nvcc): building for host memory alone")
  endif()
endmacro()

# The first nvcc of CUDA 13 or later: what the environment names, then where installers put it.
function(waybill_find_nvcc path_out version_out)
  find_program(on_path nvcc NO_CACHE)
  file(GLOB versions /usr/local/cuda-*/bin/nvcc)
  list(SORT versions COMPARE NATURAL ORDER DESCENDING)
  set(${path_out} "" PARENT_SCOPE)
  foreach(
    nvcc IN
    ITEMS "${CMAKE_CUDA_COMPILER}" "$ENV{CUDACXX}" "$ENV{CUDA_HOME}/bin/nvcc"
          "$ENV{CUDA_PATH}/bin/nvcc" "${on_path}" /usr/local/cuda/bin/nvcc ${versions}
          /opt/cuda/bin/nvcc)
    if(NOT EXISTS "${nvcc}")
      continue()
    endif()
    execute_process(COMMAND ${nvcc} --version OUTPUT_VARIABLE text ERROR_QUIET)
    if(text MATCHES "release ([0-9]+\\.[0-9]+)" AND CMAKE_MATCH_1 VERSION_GREATER_EQUAL 13)
      set(${path_out} ${nvcc} PARENT_SCOPE)
      set(${version_out} ${CMAKE_MATCH_1} PARENT_SCOPE)
      return()
    endif()
  endforeach()
endfunction()
