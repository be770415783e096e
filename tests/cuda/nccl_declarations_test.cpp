// NCCL's interface as Waybill declares it, against nccl.h where that is installed.

#include <gtest/gtest.h>

#include <cstddef>
#include <type_traits>

#include "../../src/cuda/nccl/nccl_api.h"

#if __has_include(<nccl.h>)
#include <nccl.h>

namespace waybill::cuda {
namespace {

static_assert(sizeof(NcclUniqueId) == sizeof(ncclUniqueId));
static_assert(static_cast<int>(NcclDataType::int8) == ncclInt8);
static_assert(static_cast<int>(NcclResult::success) == ncclSuccess);
static_assert(static_cast<int>(NcclResult::remote_error) == ncclRemoteError);
static_assert(static_cast<int>(NcclResult::in_progress) == ncclInProgress);

TEST(NcclDeclarations, the_configuration_begins_as_in_the_header) {
  EXPECT_GE(sizeof(ncclConfig_t), sizeof(NcclConfig));
#define EXPECT_SAME_PLACE(ours, theirs) \
  EXPECT_EQ(offsetof(NcclConfig, ours), offsetof(ncclConfig_t, theirs))
  EXPECT_SAME_PLACE(size, size);
  EXPECT_SAME_PLACE(magic, magic);
  EXPECT_SAME_PLACE(version, version);
  EXPECT_SAME_PLACE(blocking, blocking);
  EXPECT_SAME_PLACE(net_name, netName);
  EXPECT_SAME_PLACE(comm_name, commName);
  EXPECT_SAME_PLACE(channels_per_net_peer, nChannelsPerNetPeer);
  EXPECT_SAME_PLACE(nvlink_centric_scheduling, nvlinkCentricSched);
#undef EXPECT_SAME_PLACE
  const ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER;
  const NcclConfig ours;
  EXPECT_EQ(ours.magic, theirs.magic);
  EXPECT_EQ(ours.blocking, theirs.blocking);
  EXPECT_GE(theirs.version, ours.version);
}

/// Our type for one of theirs, as arguments and results are passed.
template <class T>
struct Ours {
  using Type = T;
};
template <>
struct Ours<ncclComm_t> {
  using Type = NcclComm;
};
template <>
struct Ours<ncclComm_t*> {
  using Type = NcclComm*;
};
template <>
struct Ours<ncclUniqueId> {
  using Type = NcclUniqueId;
};
template <>
struct Ours<ncclUniqueId*> {
  using Type = NcclUniqueId*;
};
template <>
struct Ours<ncclConfig_t*> {
  using Type = NcclConfig*;
};
template <>
struct Ours<ncclResult_t> {
  using Type = NcclResult;
};
template <>
struct Ours<ncclResult_t*> {
  using Type = NcclResult*;
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

#else

TEST(NcclDeclarations, the_configuration_begins_as_in_the_header) {
  GTEST_SKIP() << "nccl.h is not installed";
}

#endif
