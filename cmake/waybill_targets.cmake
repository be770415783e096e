# The few functions from which every target of the project is made.

include(CMakePackageConfigHelpers)

# What a product and a sum give is the same on every machine, so that the same seed gives the same
# plan: no compiler fuses them on the host. nvcc may on the device: where the result of device code
# is specified, it says __fmul_rn and __fadd_rn, which are never fused.
function(waybill_exact_floats target)
  target_compile_options(
    ${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>
                      $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-ffp-contract=off>)
endfunction()

# Language level, arithmetic and warnings, for every target.
function(waybill_target_defaults target)
  target_compile_features(${target} PUBLIC cxx_std_20)
  set_target_properties(${target} PROPERTIES CXX_EXTENSIONS OFF)
  waybill_exact_floats(${target})
  set(cxx "$<COMPILE_LANGUAGE:CXX>")
  target_compile_options(${target} PRIVATE $<${cxx}:-Wall> $<${cxx}:-Wextra>)
  if(WAYBILL_DEV)
    target_compile_options(
      ${target} PRIVATE "$<${cxx}:-Wpedantic;-Wshadow;-Wconversion;-Wno-sign-conversion>")
    if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
      # What gcc's optimiser guesses about inlined std::string and std::vector is often wrong.
      target_compile_options(
        ${target}
        PRIVATE
          "$<${cxx}:-Wno-restrict;-Wno-error=array-bounds;-Wno-error=stringop-overflow;-Wno-error=maybe-uninitialized>"
      )
    endif()
    set_target_properties(${target} PROPERTIES COMPILE_WARNING_AS_ERROR ON)
  endif()
endfunction()

# How .cu files are compiled: machine code for each family of devices (code for 8.0 runs on 8.6 and
# 8.9, that for 10.0 on 10.3; no instruction needs an "a"), and PTX of the newest alone, which the
# driver compiles for what comes. "90-real" is machine code, "120" that and PTX.
set(WAYBILL_CUDA_ARCHITECTURES "80-real;90-real;100-real;120"
    CACHE STRING "Compute capabilities to compile for")
# CMake 3.25 does not know how nvcc is told about C++20.
# nvcc puts a hash of a source's path into the names of its anonymous namespaces. It is told the path
# below this project, so that any folder gives the same bytes (the last of two options counts).
function(waybill_cuda_options target)
  set_target_properties(${target} PROPERTIES CUDA_ARCHITECTURES OFF)
  get_target_property(sources ${target} SOURCES)
  list(FILTER sources INCLUDE REGEX "\\.cu$")
  foreach(source IN LISTS sources)
    cmake_path(ABSOLUTE_PATH source OUTPUT_VARIABLE path)
    cmake_path(RELATIVE_PATH path BASE_DIRECTORY ${PROJECT_SOURCE_DIR})
    set_source_files_properties(
      ${source} PROPERTIES COMPILE_OPTIONS "-Xcudafe;--orig_src_path_name=${path}")
  endforeach()
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-std=c++20>)
  foreach(arch IN LISTS WAYBILL_CUDA_ARCHITECTURES)
    if(NOT arch MATCHES "^([0-9]+)([af]?)(-real)?$")
      message(FATAL_ERROR
        "WAYBILL_CUDA_ARCHITECTURES: \"${arch}\", expected such as 90, 90a or 90-real")
    endif()
    set(number ${CMAKE_MATCH_1})
    set(own ${CMAKE_MATCH_2})
    set(code sm_${number}${own})
    # PTX of 8.x would run on newer devices, without their bulk copies; that of an "a" on no other.
    if(number GREATER_EQUAL 90 AND "${own}${CMAKE_MATCH_3}" STREQUAL "")
      set(code [sm_${number},compute_${number}])
    endif()
    target_compile_options(
      ${target} PRIVATE
      "$<$<COMPILE_LANGUAGE:CUDA>:--generate-code=arch=compute_${number}${own},code=${code}>")
  endforeach()
endfunction()

# Joined, a target's files are read by the compiler ten at a time, so that what they include is read
# once for ten: less than half of the time from nothing. After a small change ten files are compiled
# for one. Either way every file must compile alone: scripts/lint.sh sees to that.
option(WAYBILL_JOIN "Compile ten source files at a time" OFF)

# waybill_join_sources(<target> <base>): has the target's sources, relative to this folder, compiled as
# files that include them relative to <base>, which the compiler must know. Sources of the build
# folder, and those with options of their own, stay as they are.
function(waybill_join_sources target base)
  if(NOT WAYBILL_JOIN)
    return()
  endif()
  get_target_property(sources ${target} SOURCES)
  set(kept)
  set(joined)
  foreach(source IN LISTS sources)
    cmake_path(ABSOLUTE_PATH source OUTPUT_VARIABLE path)
    get_source_file_property(options ${source} COMPILE_OPTIONS)
    cmake_path(IS_PREFIX base ${path} in_base)
    if(source MATCHES "\\.cpp$" AND in_base AND NOT options)
      list(APPEND joined ${path})
    else()
      list(APPEND kept ${source})
    endif()
  endforeach()
  set(number 0)
  while(joined)
    list(SUBLIST joined 0 10 group)
    list(REMOVE_ITEM joined ${group})
    math(EXPR number "${number} + 1")
    set(text "")
    foreach(path IN LISTS group)
      # Relative, so that a compiler's cache knows it again in another folder.
      cmake_path(RELATIVE_PATH path BASE_DIRECTORY ${base})
      string(APPEND text "#include \"${path}\"\n")
    endforeach()
    set(file ${PROJECT_BINARY_DIR}/joined/${target}_${number}.cpp)
    file(CONFIGURE OUTPUT ${file} CONTENT "${text}" @ONLY)
    list(APPEND kept ${file})
  endwhile()
  set_target_properties(${target} PROPERTIES SOURCES "${kept}")
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # Types of one file, in what gcc takes for a header; locals named as a constant of another file.
    target_compile_options(
      ${target}
      PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:-Wno-subobject-linkage;-Wno-shadow;-Wshadow=local>")
  endif()
endfunction()

# Reading the standard library takes a quarter of the time of joined sources: gcc reads it once. ccache
# keeps nothing of such files unless it is told to.
option(WAYBILL_PCH "Precompile headers for joined sources and for tests (gcc)" ON)
if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  set(WAYBILL_PCH OFF)
elseif(CMAKE_CXX_COMPILER_LAUNCHER MATCHES "ccache$")
  execute_process(
    COMMAND ${CMAKE_CXX_COMPILER_LAUNCHER} --get-config sloppiness
    OUTPUT_VARIABLE sloppiness ERROR_QUIET)
  if(NOT (sloppiness MATCHES "pch_defines" AND sloppiness MATCHES "time_macros"))
    message(STATUS "No precompiled headers: ccache needs CCACHE_SLOPPINESS=pch_defines,time_macros")
    set(WAYBILL_PCH OFF)
  endif()
endif()

# waybill_precompile_headers(<target> <header>... | <target> REUSE <other>): these headers, or those of
# another target that is compiled with the same options.
function(waybill_precompile_headers target)
  target_compile_options(${target} PRIVATE -fpch-preprocess)  # ccache needs it
  if("${ARGV1}" STREQUAL "REUSE")
    target_precompile_headers(${target} REUSE_FROM ${ARGV2})
  else()
    target_precompile_headers(${target} PRIVATE ${ARGN})
  endif()
endfunction()

# The standard library for a module. Only where sources are joined: others must compile alone.
function(waybill_precompile_standard target)
  if(NOT WAYBILL_JOIN OR NOT WAYBILL_PCH)
    return()
  endif()
  if(NOT TARGET waybill_headers)
    file(WRITE ${PROJECT_BINARY_DIR}/headers/empty.cpp "")
    add_library(waybill_headers OBJECT EXCLUDE_FROM_ALL ${PROJECT_BINARY_DIR}/headers/empty.cpp)
    waybill_target_defaults(waybill_headers)
    set_target_properties(
      waybill_headers PROPERTIES POSITION_INDEPENDENT_CODE ON
                                 RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/headers)
    waybill_precompile_headers(
      waybill_headers <algorithm> <array> <chrono> <functional> <map> <memory> <optional> <span>
      <sstream> <string> <thread> <vector>)
  endif()
  waybill_precompile_headers(${target} REUSE waybill_headers)
endfunction()

# waybill_add_module(<name> SOURCES <.cpp...> HEADERS <.h...> [DEPENDS <module...>])
#
# Makes the static library waybill_<name>, alias waybill::<name>, and puts it into the install.
# SOURCES are relative to src/<name>, HEADERS to include/waybill/<name>. Modules include private headers
# of src as "<name>/x.h".
function(waybill_add_module name)
  cmake_parse_arguments(PARSE_ARGV 1 module "" "" "SOURCES;HEADERS;DEPENDS")
  if(module_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "waybill_add_module(${name}): unknown ${module_UNPARSED_ARGUMENTS}")
  endif()
  set(include_dir ${PROJECT_SOURCE_DIR}/include)
  list(TRANSFORM module_HEADERS PREPEND ${include_dir}/waybill/${name}/)
  list(TRANSFORM module_DEPENDS PREPEND waybill::)

  set(target waybill_${name})
  add_library(${target} STATIC ${module_SOURCES})
  add_library(waybill::${name} ALIAS ${target})
  waybill_target_defaults(${target})
  target_sources(${target} PUBLIC FILE_SET HEADERS BASE_DIRS ${include_dir} FILES ${module_HEADERS})
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/src)
  if(NOT target STREQUAL "waybill_cuda")  # nvcc takes far longer than what joining would save
    waybill_join_sources(${target} ${PROJECT_SOURCE_DIR}/src)
    waybill_precompile_standard(${target})
  endif()
  target_link_libraries(${target} PUBLIC ${module_DEPENDS})
  set_target_properties(
    ${target} PROPERTIES EXPORT_NAME ${name} POSITION_INDEPENDENT_CODE ON)
  install(TARGETS ${target} EXPORT waybill FILE_SET HEADERS)
  set_property(GLOBAL APPEND PROPERTY WAYBILL_MODULES ${name})
endfunction()

# To be called after the last module: waybill::waybill (all modules) and the package files for
# find_package(waybill).
function(waybill_finish_library)
  get_property(modules GLOBAL PROPERTY WAYBILL_MODULES)
  add_library(waybill_all INTERFACE)
  add_library(waybill::waybill ALIAS waybill_all)
  foreach(module IN LISTS modules)
    target_link_libraries(waybill_all INTERFACE waybill::${module})
  endforeach()
  set_target_properties(waybill_all PROPERTIES EXPORT_NAME waybill)
  set(include_dir ${PROJECT_SOURCE_DIR}/include)
  target_sources(
    waybill_all
    INTERFACE FILE_SET HEADERS BASE_DIRS ${include_dir}
              FILES ${include_dir}/waybill/experts.h ${include_dir}/waybill/plan.h
                    ${include_dir}/waybill/sequence.h ${include_dir}/waybill/version.h)

  set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/waybill)
  install(TARGETS waybill_all EXPORT waybill FILE_SET HEADERS)
  install(EXPORT waybill NAMESPACE waybill:: FILE waybillTargets.cmake DESTINATION ${package_dir})
  configure_package_config_file(cmake/waybillConfig.cmake.in
                                ${PROJECT_BINARY_DIR}/waybillConfig.cmake
                                INSTALL_DESTINATION ${package_dir})
  write_basic_package_version_file(${PROJECT_BINARY_DIR}/waybillConfigVersion.cmake
                                   COMPATIBILITY SameMinorVersion)
  install(FILES ${PROJECT_BINARY_DIR}/waybillConfig.cmake
                ${PROJECT_BINARY_DIR}/waybillConfigVersion.cmake DESTINATION ${package_dir})
  install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
endfunction()
