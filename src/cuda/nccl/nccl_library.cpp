#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "nccl_communicator.h"
#include "waybill/core/error.h"

namespace waybill::cuda {
namespace {

constexpr const char* library_file = "libnccl.so.2";

std::string variable(const char* name) {
  const char* const text = std::getenv(name);
  return text == nullptr ? "" : text;
}

/// Finds the functions of a loaded library. Nullopt: `tried` gets the reason.
std::optional<NcclApi> functions_of(void* handle, const std::string& place, std::string& tried) {
  NcclApi api{};
  NcclResult (*get_version)(int*) = nullptr;
  std::string missing;
  const auto find = [&](const char* name, auto& function) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
    if (function == nullptr && missing.empty()) missing = name;
  };
  find("ncclGetVersion", get_version);
  find("ncclGetUniqueId", api.get_unique_id);
  find("ncclCommInitRankConfig", api.init_rank);
  find("ncclCommAbort", api.abort);
  find("ncclCommGetAsyncError", api.get_async_error);
  find("ncclGetErrorString", api.error_text);
  find("ncclGetLastError", api.last_error);
  find("ncclGroupStart", api.group_start);
  find("ncclGroupEnd", api.group_end);
  find("ncclSend", api.send);
  find("ncclRecv", api.receive);
  if (get_version != nullptr && get_version(&api.version) != NcclResult::success) api.version = 0;
  if (api.version < min_nccl_version || api.version >= next_nccl_version) {
    tried += concat("\n  ", place, ": NCCL ", nccl_version_text(api.version),
                    ", expected 2.28 or a later version 2");
    return {};
  }
  if (!missing.empty()) {
    tried += concat("\n  ", place, ": it has no ", missing);
    return {};
  }
  return api;
}

/// Returns the files to try, with flags of dlopen.
std::vector<std::pair<std::string, int>> files() {
  if (const std::string named = variable("WAYBILL_NCCL_LIBRARY"); !named.empty()) {
    return {{named, 0}};
  }
  std::vector<std::pair<std::string, int>> files{
      {library_file, RTLD_NOLOAD}};  // a process must not have two NCCLs
  if (const std::string home = variable("NCCL_HOME"); !home.empty()) {
    files.push_back({(std::filesystem::path(home) / "lib" / library_file).string(), 0});
  }
  files.push_back({library_file, 0});
  return files;
}

NcclApi load() {
  std::string tried;
  for (const auto& [file, flags] : files()) {
    void* const library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL | flags);
    if (library == nullptr) {
      const char* const why = dlerror();
      if (flags == 0) tried += concat("\n  ", why != nullptr ? why : file.c_str());
      continue;
    }
    if (const auto api = functions_of(library, file, tried)) return *api;
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

#if __has_include(<nccl.h>)
#include <nccl.h>

// NCCL's declarations, where they are installed, against those of nccl_communicator.h.
namespace waybill::cuda {

static_assert(sizeof(NcclUniqueId) == sizeof(ncclUniqueId));
static_assert(nccl_int8 == ncclInt8);
static_assert(static_cast<int>(NcclResult::success) == ncclSuccess);
static_assert(static_cast<int>(NcclResult::remote_error) == ncclRemoteError);
static_assert(static_cast<int>(NcclResult::in_progress) == ncclInProgress);
static_assert(NcclConfig::unset == NCCL_CONFIG_UNDEF_INT);
static_assert(NCCL_VERSION_CODE < min_nccl_version ||
              (sizeof(ncclConfig_t) >= sizeof(NcclConfig) &&
               offsetof(ncclConfig_t, magic) == offsetof(NcclConfig, magic) &&
               offsetof(ncclConfig_t, version) == offsetof(NcclConfig, version) &&
               offsetof(ncclConfig_t, blocking) == offsetof(NcclConfig, blocking) &&
               offsetof(ncclConfig_t, netName) == offsetof(NcclConfig, net_name) &&
               offsetof(ncclConfig_t, commName) == offsetof(NcclConfig, comm_name)));

// The types that stand for NCCL's in arguments and results; all others stay.
template <class T>
T ours(T);
NcclComm ours(ncclComm_t);
NcclUniqueId ours(ncclUniqueId);
NcclConfig ours(ncclConfig_t);
NcclResult ours(ncclResult_t);
int ours(ncclDataType_t);
NcclComm* ours(ncclComm_t*);
NcclUniqueId* ours(ncclUniqueId*);
NcclConfig* ours(ncclConfig_t*);
NcclResult* ours(ncclResult_t*);

template <class Result, class... Arguments>
auto ours(Result (*)(Arguments...))
    -> decltype(ours(std::declval<Result>())) (*)(decltype(ours(std::declval<Arguments>()))...);

template <auto Theirs, class Declared>
constexpr bool same = std::is_same_v<decltype(ours(Theirs)), Declared>;

static_assert(same<&ncclGetUniqueId, decltype(NcclApi::get_unique_id)>);
static_assert(same<&ncclCommInitRankConfig, decltype(NcclApi::init_rank)>);
static_assert(same<&ncclCommAbort, decltype(NcclApi::abort)>);
static_assert(same<&ncclCommGetAsyncError, decltype(NcclApi::get_async_error)>);
static_assert(same<&ncclGetErrorString, decltype(NcclApi::error_text)>);
static_assert(same<&ncclGetLastError, decltype(NcclApi::last_error)>);
static_assert(same<&ncclGroupStart, decltype(NcclApi::group_start)>);
static_assert(same<&ncclGroupEnd, decltype(NcclApi::group_end)>);
static_assert(same<&ncclSend, decltype(NcclApi::send)>);
static_assert(same<&ncclRecv, decltype(NcclApi::receive)>);

}  // namespace waybill::cuda

#endif
