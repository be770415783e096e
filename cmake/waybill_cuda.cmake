# WAYBILL_CUDA=AUTO, as pip builds: ON where CUDA 13 is and GPUs with a driver that takes it, for the
# architectures of these GPUs. Sets WAYBILL_CUDA, where it is ON WAYBILL_CUDA_ARCHITECTURES unless it is
# set, and waybill_found, which says what is here. Needs waybill_nvcc and waybill_nvcc_version.
macro(waybill_decide_cuda)
  waybill_find_gpus(waybill_gpus waybill_gpu_architectures waybill_driver)
  set(WAYBILL_CUDA OFF)
  if(waybill_nvcc AND waybill_gpus AND waybill_driver VERSION_GREATER_EQUAL 580)
    set(WAYBILL_CUDA ON)
    if(waybill_gpu_architectures AND NOT WAYBILL_CUDA_ARCHITECTURES)
      set(WAYBILL_CUDA_ARCHITECTURES "${waybill_gpu_architectures}" CACHE STRING "Of the GPUs here")
    endif()
    set(waybill_found "CUDA ${waybill_nvcc_version} and GPUs (${waybill_gpus}) are here")
  elseif(waybill_nvcc AND waybill_gpus)
    set(waybill_found "CUDA ${waybill_nvcc_version} is here, but driver ${waybill_driver} of the GPUs \
does not take it (580 or later does)")
  elseif(waybill_nvcc)
    set(waybill_found "CUDA ${waybill_nvcc_version} is here, but no GPU with a driver")
  elseif(waybill_gpus)
    set(waybill_found "GPUs (${waybill_gpus}) are here, but no CUDA 13 (nvcc)")
  else()
    set(waybill_found "neither CUDA 13 (nvcc) nor a GPU is here")
  endif()
endmacro()

# Says what is built and why, and how to choose otherwise: to CMake's output, and to the terminal of
# pip, which shows no output of a build that goes well.
function(waybill_say_cuda found)
  if(WAYBILL_CUDA)
    string(REPLACE "-real" "" architectures "${WAYBILL_CUDA_ARCHITECTURES}")
    string(REPLACE ";" ", " architectures "${architectures}")
    set(text "waybill: ${found}: building for GPUs too (${architectures}), which takes several minutes. \
Without: SKBUILD_CMAKE_DEFINE=WAYBILL_CUDA=OFF pip install .")
  else()
    set(text "waybill: ${found}: building for host memory alone, about two minutes of one core. \
For GPUs: SKBUILD_CMAKE_DEFINE=WAYBILL_CUDA=ON pip install ., which needs CUDA 13, no GPU.")
  endif()
  message(NOTICE "${text}")
  if(SKBUILD)
    execute_process(COMMAND ${Python_EXECUTABLE} ${PROJECT_SOURCE_DIR}/cmake/tell_installer.py ${text})
  endif()
endfunction()

# How many GPUs NVIDIA's driver shows, their architectures, and the driver's version; 0: no driver.
# Architectures that the project does not know leave the list empty.
function(waybill_find_gpus count_out architectures_out driver_out)
  set(${count_out} 0 PARENT_SCOPE)
  set(${architectures_out} "" PARENT_SCOPE)
  execute_process(
    COMMAND nvidia-smi --query-gpu=compute_cap,driver_version --format=csv,noheader
    OUTPUT_VARIABLE text OUTPUT_STRIP_TRAILING_WHITESPACE
    RESULT_VARIABLE status ERROR_QUIET)
  if(NOT status EQUAL 0 OR NOT text MATCHES "^[0-9]+\\.[0-9]+, ([0-9.]+)")
    return()
  endif()
  set(${driver_out} ${CMAKE_MATCH_1} PARENT_SCOPE)
  string(REPLACE "\n" ";" lines "${text}")
  list(LENGTH lines count)
  set(${count_out} ${count} PARENT_SCOPE)
  set(architectures)
  foreach(line IN LISTS lines)
    string(REGEX REPLACE "\\..*" "" major "${line}")
    if(NOT major MATCHES "^(8|9|10|12)$")
      return()
    endif()
    list(APPEND architectures ${major}0)
  endforeach()
  list(REMOVE_DUPLICATES architectures)
  set(${architectures_out} "${architectures}" PARENT_SCOPE)
endfunction()

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
