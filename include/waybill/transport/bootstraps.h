#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "waybill/transport/bootstrap.h"
#include "waybill/transport/launch_environment.h"

namespace waybill {

/// For ranks that are threads of this process: one object per rank, to be handed to its thread.
/// They share a failure_scope(), which fail() ends.
/// @throws InvalidArgument unless world_size >= 1, and as check_timeout
[[nodiscard]] std::vector<std::unique_ptr<Bootstrap>> make_thread_bootstraps(
    std::int32_t world_size, double timeout_s = default_timeout_s);

/// Through rank 0, which listens on `port` of `host` (a name or an address; IPv4 and IPv6), or on
/// all addresses of its machine where its own name stands for a loopback address there. The others
/// call until the deadline; a rank is in when rank 0 has let it in. Callers of another job, world
/// or release, and those without the job's secret, are hung up on with the reason and a line on
/// stderr, and change nothing for the others. Collective. Traffic is not encrypted: for trusted
/// networks only (SECURITY.md).
/// @throws Timeout naming a rank that did not come; PeerFailed naming one that failed;
///   TransportError with the reason when this rank is refused; InvalidArgument
[[nodiscard]] std::unique_ptr<Bootstrap> make_tcp_bootstrap(
    std::int32_t rank, std::int32_t world_size, const std::string& host, std::uint16_t port,
    double timeout_s = default_timeout_s, const JobIdentity& job = {});

/// Through files in a folder that all ranks see. It is made when it is missing (its parent is not);
/// it must belong to this user alone (mode 0700) and hold no files of another run. What the ranks
/// write goes when the last of them has gone, and so does a folder that they have made.
/// @throws TransportError with the reason of the system when the folder is not like that or cannot
///   be used, and when it is another job's; InvalidArgument
[[nodiscard]] std::unique_ptr<Bootstrap> make_file_bootstrap(std::int32_t rank,
                                                             std::int32_t world_size,
                                                             const std::string& folder,
                                                             double timeout_s = default_timeout_s,
                                                             const JobIdentity& job = {});

/// Through what the environment names: TCP or files. @throws as these, and as
/// read_launch_environment; InvalidArgument when no place to meet is named and world_size > 1.
[[nodiscard]] std::unique_ptr<Bootstrap> make_environment_bootstrap(
    const LaunchEnvironment& environment, double timeout_s = default_timeout_s);

/// For a rank that cannot start, before it has a bootstrap: goes to where the ranks meet and says
/// why, so that they name it and do not wait for it. Takes at most patience_s; where that is not
/// possible it does nothing.
void report_failed_start(const LaunchEnvironment& environment, std::string_view reason,
                         double patience_s = 5) noexcept;

/// An all-gather that the caller already has (MPI, torch.distributed). It answers for its deadline.
using AllGather = std::function<std::vector<Bootstrap::Bytes>(const Bootstrap::Bytes& mine)>;
/// How the caller tells the other ranks that this one gives up: their all-gather is to throw.
using TellFailure = std::function<void(std::string_view reason)>;
/// @param tell_failure empty: they are not told
/// @throws InvalidArgument for an empty all_gather. all_gather throws TransportError when it does
///   not return world_size entries.
[[nodiscard]] std::unique_ptr<Bootstrap> make_callable_bootstrap(
    std::int32_t rank, std::int32_t world_size, AllGather all_gather,
    double timeout_s = default_timeout_s, TellFailure tell_failure = {});

}  // namespace waybill
