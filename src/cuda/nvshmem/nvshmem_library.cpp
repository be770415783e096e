#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "nvshmem_api.h"
#include "waybill/core/error.h"

namespace waybill::cuda {
namespace {

constexpr const char* library_file = "libwaybill_nvshmem.so";
constexpr const char* host_library_file = "libnvshmem_host.so.3";

std::string variable(const char* name) {
  const char* const text = std::getenv(name);
  return text == nullptr ? "" : text;
}

/// Returns the folder of the program or shared library that this code is linked into.
std::filesystem::path own_folder() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&nvshmem_api), &info) == 0) return {};
  if (info.dli_fname == nullptr) return {};
  std::error_code ignored;
  const auto file = std::filesystem::absolute(info.dli_fname, ignored);
  return file.parent_path();
}

/// Loads NVSHMEM first, so that the library below finds it loaded.
void load_host_library(std::string& tried) {
  const std::string home = variable("NVSHMEM_HOME");
  if (home.empty()) return;
  const auto file = std::filesystem::path(home) / "lib" / host_library_file;
  if (dlopen(file.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) tried += concat("\n  ", dlerror());
}

const NvshmemApi& load() {
  std::string tried;
  load_host_library(tried);
  std::vector<std::string> addresses;
  if (const std::string named = variable("WAYBILL_NVSHMEM_LIBRARY"); !named.empty()) {
    addresses.push_back(named);
  } else {
    addresses = {(own_folder() / library_file).string(), library_file};
  }
  for (const std::string& place : addresses) {
    void* const library = dlopen(place.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      tried += concat("\n  ", dlerror());
      continue;
    }
    const auto get = reinterpret_cast<GetNvshmemApi>(dlsym(library, nvshmem_api_symbol));
    const NvshmemApi* const api = get != nullptr ? get() : nullptr;
    if (api != nullptr && api->version == nvshmem_api_version) return *api;
    tried += concat("\n  ", place, ": of another build of Waybill");
  }
  throw Unsupported(
      concat("NVSHMEM cannot be used: ", library_file, " or ", host_library_file,
             " did not load. Build Waybill with -DWAYBILL_NVSHMEM=ON; name the first in "
             "WAYBILL_NVSHMEM_LIBRARY, and in NVSHMEM_HOME the folder of NVSHMEM (of the package "
             "nvidia-nvshmem-cu13: site-packages/nvidia/nvshmem). Tried:",
             tried));
}

}  // namespace

const NvshmemApi& nvshmem_api() {
  static const NvshmemApi& api = load();
  return api;
}

}  // namespace waybill::cuda
