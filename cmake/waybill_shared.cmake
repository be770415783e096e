# libwaybill.so, one file with all modules: the Python package has it, for its extension, for the
# program and for programs in C++, which find it with find_package(waybill) as they find the static
# libraries.

# To be called after waybill_finish_library. Makes waybill_shared.
function(waybill_add_shared)
  get_property(modules GLOBAL PROPERTY WAYBILL_MODULES)
  list(TRANSFORM modules REPLACE "(.+)" "$<TARGET_OBJECTS:waybill_\\1>" OUTPUT_VARIABLE objects)
  add_library(waybill_shared SHARED ${objects})
  set_target_properties(
    waybill_shared PROPERTIES OUTPUT_NAME waybill EXPORT_NAME waybill LINKER_LANGUAGE CXX
                              LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/lib
                              LINK_DEPENDS ${PROJECT_SOURCE_DIR}/cmake/libwaybill.map)
  target_compile_features(waybill_shared PUBLIC cxx_std_20)
  target_include_directories(waybill_shared
                             INTERFACE "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>")
  target_link_libraries(waybill_shared PUBLIC Threads::Threads PRIVATE ${CMAKE_DL_LIBS})
  if(WAYBILL_CUDA)
    target_link_libraries(waybill_shared PRIVATE CUDA::cudart_static)
  endif()
  # Calls between its own functions are bound when it is linked.
  target_link_options(
    waybill_shared PRIVATE LINKER:--version-script=${PROJECT_SOURCE_DIR}/cmake/libwaybill.map
                           LINKER:-Bsymbolic-functions LINKER:--no-undefined)
  install(TARGETS waybill_shared LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})  # for the program
endfunction()

# waybill_install_package(<dir>): the library, the program, headers and the files of find_package, into
# the folder of the Python package. Only on demand, with --component python.
function(waybill_install_package dir)
  target_include_directories(waybill_shared INTERFACE "$<INSTALL_INTERFACE:${dir}/include>")
  install(TARGETS waybill_shared EXPORT waybill_package COMPONENT python
          LIBRARY DESTINATION ${dir}/lib EXCLUDE_FROM_ALL)
  install(TARGETS waybill_cli COMPONENT python RUNTIME DESTINATION ${dir}/bin EXCLUDE_FROM_ALL)
  set(unused)
  if(NOT WAYBILL_CUDA)
    set(unused PATTERN cuda EXCLUDE)
  endif()
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/waybill COMPONENT python DESTINATION ${dir}/include
          EXCLUDE_FROM_ALL FILES_MATCHING PATTERN *.h ${unused})
  install(EXPORT waybill_package COMPONENT python NAMESPACE waybill:: FILE waybillTargets.cmake
          DESTINATION ${dir}/lib/cmake/waybill EXCLUDE_FROM_ALL)
  install(FILES ${PROJECT_BINARY_DIR}/waybillConfig.cmake
                ${PROJECT_BINARY_DIR}/waybillConfigVersion.cmake
          COMPONENT python DESTINATION ${dir}/lib/cmake/waybill EXCLUDE_FROM_ALL)
endfunction()
