#include "nccl_library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>
#include <optional>
#include <vector>

#include "waybill/core/error.h"

namespace waybill::cuda {
namespace {

constexpr const char* library_file = "libnccl.so.2";

std::string variable(const char* name) {
  const char* const text = std::getenv(name);
  return text == nullptr ? "" : text;
}

/// A library that stays loaded, and the functions of NCCL in it.
class Library {
 public:
  explicit Library(void* handle) : handle_(handle) {}

  template <class Function>
  void take(const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(handle_, name));
    if (function == nullptr && missing_.empty()) missing_ = name;
  }

  /// The first that was not there.
  [[nodiscard]] const std::string& missing() const noexcept { return missing_; }

 private:
  void* handle_;
  std::string missing_;
};

/// The functions of a loaded library, or nothing, with the reason in `tried`.
std::optional<NcclApi> functions_of(void* handle, const std::string& place, std::string& tried) {
  Library library(handle);
  NcclApi api{};
  NcclResult (*get_version)(int*) = nullptr;
  library.take("ncclGetVersion", get_version);
  library.take("ncclGetUniqueId", api.get_unique_id);
  library.take("ncclCommInitRankConfig", api.init_rank);
  library.take("ncclCommAbort", api.abort);
  library.take("ncclCommGetAsyncError", api.get_async_error);
  library.take("ncclGetErrorString", api.error_text);
  library.take("ncclGetLastError", api.last_error);
  library.take("ncclGroupStart", api.group_start);
  library.take("ncclGroupEnd", api.group_end);
  library.take("ncclSend", api.send);
  library.take("ncclRecv", api.receive);
  if (get_version != nullptr && get_version(&api.version) != NcclResult::success) api.version = 0;
  if (api.version < least_nccl_version || api.version >= next_nccl_version) {
    tried += concat("\n  ", place, ": NCCL ", nccl_version_text(api.version),
                    ", expected 2.28 or a later version 2");
    return {};
  }
  if (!library.missing().empty()) {
    tried += concat("\n  ", place, ": it has no ", library.missing());
    return {};
  }
  return api;
}

struct Place {
  std::string file;
  int flags = 0;
};

std::vector<Place> places() {
  if (const std::string named = variable("WAYBILL_NCCL_LIBRARY"); !named.empty()) {
    return {{named}};
  }
  std::vector<Place> places{
      {library_file, RTLD_NOLOAD}};  // two NCCLs in a process are one too many
  if (const std::string home = variable("NCCL_HOME"); !home.empty()) {
    places.push_back({(std::filesystem::path(home) / "lib" / library_file).string()});
  }
  places.push_back({library_file});
  return places;
}

NcclApi load() {
  std::string tried;
  for (const Place& place : places()) {
    void* const library = dlopen(place.file.c_str(), RTLD_NOW | RTLD_LOCAL | place.flags);
    if (library == nullptr) {
      const char* const why = dlerror();
      if (place.flags == 0) tried += concat("\n  ", why != nullptr ? why : place.file.c_str());
      continue;
    }
    if (const auto api = functions_of(library, place.file, tried)) return *api;
  }
  throw Unsupported(
      concat("NCCL cannot be used: no ", library_file,
             " of version 2.28 or later was found. Install NCCL (the package nvidia-nccl-cu13, or "
             "libnccl2 of NVIDIA's repositories) and, unless the system finds it, name its file in "
             "WAYBILL_NCCL_LIBRARY (of the package: site-packages/nvidia/nccl/lib/",
             library_file, "). Tried:", tried));
}

}  // namespace

const NcclApi& nccl_api() {
  static const NcclApi api = load();
  return api;
}

std::string nccl_version_text(int version) {
  return concat(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

}  // namespace waybill::cuda
