# The third-party packages that the library's modules and the program are built with. What pip
# brought comes first, then those of the system; else a pinned snapshot serves.

# nlohmann_json::nlohmann_json
function(waybill_find_json)
  if(SKBUILD)  # the wheel of the headers is among the build requirements in pyproject.toml
    find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)
    execute_process(
      COMMAND
        ${Python_EXECUTABLE} -c
        "import importlib.metadata as m, importlib.resources as r; print(r.files('nlohmann_json') / 'include', m.version('nlohmann_json'), sep=';')"
      OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET
      OUTPUT_VARIABLE found RESULT_VARIABLE status)
    if(status EQUAL 0)
      list(POP_BACK found version)
      list(GET found 0 include_dir)
      set(waybill_json_version ${version} CACHE INTERNAL "For the bill of materials")
      add_library(nlohmann_json::nlohmann_json INTERFACE IMPORTED GLOBAL)
      target_include_directories(nlohmann_json::nlohmann_json INTERFACE ${include_dir})
      return()
    endif()
  endif()
  find_package(nlohmann_json 3.11 QUIET GLOBAL)
  if(nlohmann_json_FOUND)
    set(waybill_json_version ${nlohmann_json_VERSION} CACHE INTERNAL "For the bill of materials")
    return()
  endif()
  message(FATAL_ERROR "nlohmann_json 3.11 was not found: run scripts/setup.sh")
endfunction()

# CLI11::CLI11
function(waybill_find_cli11)
  find_package(CLI11 2.1 QUIET GLOBAL)
  if(CLI11_FOUND)
    set(waybill_cli11_version ${CLI11_VERSION} CACHE INTERNAL "For the bill of materials")
    return()
  endif()
  message(STATUS "CLI11 is not installed: fetching it from GitHub. If that fails, install it"
                 " (Debian and Ubuntu: apt-get install libcli11-dev)")
  include(FetchContent)
  FetchContent_Declare(
    cli11
    GIT_REPOSITORY https://github.com/CLIUtils/CLI11.git
    GIT_TAG 6c7b07a878ad834957b98d0f9ce1dbe0cb204fc9) # v2.4.2
  set(CLI11_BUILD_TESTS OFF)
  set(CLI11_BUILD_EXAMPLES OFF)
  set(CLI11_BUILD_DOCS OFF)
  set(CLI11_INSTALL OFF)
  FetchContent_MakeAvailable(cli11)
  set(waybill_cli11_version 2.4.2 CACHE INTERNAL "For the bill of materials")
endfunction()
