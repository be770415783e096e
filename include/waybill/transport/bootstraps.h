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

/// For ranks that are threads of this process: one object a rank, to be handed to its thread. They
/// share a failure_scope(), which fail() ends.
/// @throws InvalidArgument unless world_size >= 1, and as check_timeout
[[nodiscard]] std::vector<std::unique_ptr<Bootstrap>> make_thread_bootstraps(
    std::int32_t world_size, double timeout_s = default_timeout_s);

/// Through rank 0, which listens on `port` of `host` (a name or an address; IPv4 and IPv6). The
/// others try to connect until the deadline. Collective. Traffic is not encrypted and callers are
/// not authenticated: for trusted networks only.
/// @throws Timeout, TransportError, InvalidArgument
[[nodiscard]] std::unique_ptr<Bootstrap> make_tcp_bootstrap(std::int32_t rank,
                                                            std::int32_t world_size,
                                                            const std::string& host,
                                                            std::uint16_t port,
                                                            double timeout_s = default_timeout_s);

/// Through files in a folder that all ranks see and that no earlier run has used. The folder is
/// made when it is missing; files stay until the folder is deleted.
/// @throws TransportError when it cannot be written or holds this rank's files of an earlier run.
[[nodiscard]] std::unique_ptr<Bootstrap> make_file_bootstrap(std::int32_t rank,
                                                             std::int32_t world_size,
                                                             const std::string& folder,
                                                             double timeout_s = default_timeout_s);

/// Through what the environment names: TCP or files. @throws as these, and as
/// read_launch_environment; InvalidArgument when no place to meet is named and world_size > 1.
[[nodiscard]] std::unique_ptr<Bootstrap> make_environment_bootstrap(
    const LaunchEnvironment& environment, double timeout_s = default_timeout_s);

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
