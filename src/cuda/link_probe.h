#pragma once

#include <cstdint>

#include "waybill/core/link_speeds.h"

namespace waybill {

/// How the bytes of the probe go; bulk copies by loads and stores of the threads where a device has
/// none.
enum class LinkWay : std::uint8_t { push_bulk, push_vector, pull_bulk, copy_engines };

/// Every GPU copies `bytes_a_peer` to (or from) each of the others at once; the median over
/// `repeats` calls of the slowest GPU's time.
/// @return remote GB/s per GPU and direction; 0 with one GPU
/// @throws CudaError
[[nodiscard]] double link_gb_s(int num_gpus, LinkWay way, int num_sms, std::int64_t bytes_a_peer,
                               int repeats = 10);

/// The links of this machine's GPUs: the best rate of pushes over numbers of multiprocessors, and
/// what one of few pushes. The network is not measured: it is `known`'s.
/// @throws Unsupported with fewer than two GPUs, or without access to each other; CudaError
[[nodiscard]] LinkSpeeds measure_links(int num_gpus, const LinkSpeeds& known = {});

/// Local copy by a device-to-device cudaMemcpy: bytes read plus written a second, in GB/s.
[[nodiscard]] double local_copy_gb_s(std::int64_t bytes);

}  // namespace waybill
