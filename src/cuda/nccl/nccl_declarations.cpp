// NCCL's interface as Waybill declares it, against nccl.h where that is installed.

#include "nccl_api.h"

#if __has_include(<nccl.h>)
#include <nccl.h>

#include <cstddef>
#include <type_traits>

namespace waybill::cuda {
namespace {

static_assert(sizeof(NcclUniqueId) == sizeof(ncclUniqueId));
static_assert(static_cast<int>(NcclDataType::int8) == ncclInt8);
static_assert(static_cast<int>(NcclResult::success) == ncclSuccess);
static_assert(static_cast<int>(NcclResult::remote_error) == ncclRemoteError);
static_assert(static_cast<int>(NcclResult::in_progress) == ncclInProgress);
static_assert(NcclConfig::unset == NCCL_CONFIG_UNDEF_INT);
static_assert(NCCL_VERSION_CODE < least_nccl_version ||
              (sizeof(ncclConfig_t) >= sizeof(NcclConfig) &&
               offsetof(ncclConfig_t, magic) == offsetof(NcclConfig, magic) &&
               offsetof(ncclConfig_t, version) == offsetof(NcclConfig, version) &&
               offsetof(ncclConfig_t, blocking) == offsetof(NcclConfig, blocking) &&
               offsetof(ncclConfig_t, netName) == offsetof(NcclConfig, net_name) &&
               offsetof(ncclConfig_t, commName) == offsetof(NcclConfig, comm_name)));

/// Our type for one of theirs, as arguments and results are passed.
template <class T>
struct Ours {
  using Type = T;
};
template <class T>
struct Ours<T*> {
  using Type = typename Ours<T>::Type*;
};
template <>
struct Ours<ncclComm_t> {
  using Type = NcclComm;
};
template <>
struct Ours<ncclUniqueId> {
  using Type = NcclUniqueId;
};
template <>
struct Ours<ncclConfig_t> {
  using Type = NcclConfig;
};
template <>
struct Ours<ncclResult_t> {
  using Type = NcclResult;
};
template <>
struct Ours<ncclDataType_t> {
  using Type = NcclDataType;
};

template <class Function>
struct OurFunction;
template <class Result, class... Arguments>
struct OurFunction<Result(Arguments...)> {
  using Type = typename Ours<Result>::Type (*)(typename Ours<Arguments>::Type...);
};

template <class Theirs, class Declared>
constexpr bool same = std::is_same_v<typename OurFunction<Theirs>::Type, Declared>;

static_assert(same<decltype(ncclGetUniqueId), decltype(NcclApi::get_unique_id)>);
static_assert(same<decltype(ncclCommInitRankConfig), decltype(NcclApi::init_rank)>);
static_assert(same<decltype(ncclCommAbort), decltype(NcclApi::abort)>);
static_assert(same<decltype(ncclCommGetAsyncError), decltype(NcclApi::get_async_error)>);
static_assert(same<decltype(ncclGetErrorString), decltype(NcclApi::error_text)>);
static_assert(same<decltype(ncclGetLastError), decltype(NcclApi::last_error)>);
static_assert(same<decltype(ncclGroupStart), decltype(NcclApi::group_start)>);
static_assert(same<decltype(ncclGroupEnd), decltype(NcclApi::group_end)>);
static_assert(same<decltype(ncclSend), decltype(NcclApi::send)>);
static_assert(same<decltype(ncclRecv), decltype(NcclApi::receive)>);

}  // namespace
}  // namespace waybill::cuda

#endif
