#pragma once

namespace waybill::cuda {

/// Bulk copies need so much of a block's shared memory for rings of rows. Devices with less move
/// rows with loads and stores of the threads.
inline constexpr int bulk_shared_bytes = 227 * 1024;

/// The limits that kernels may count on. Tests lower them by max_shared_kb and no_bulk_copies of
/// WAYBILL_TEST (core/test_hooks.h).
struct DeviceLimits {
  int shared_bytes = 0;  ///< a block's, if a kernel asks for more than 48 KiB
  bool bulk_copies =
      false;  ///< the device has them and room, and the kernels that it loaded do too
};

/// Asks the device, and the kernels that it has loaded: those of PTX for older devices lack bulk
/// copies. From now on shared_bytes_of_block() returns this value.
/// @throws Unsupported when no kernel of this build runs on the device; InvalidArgument for a value
///   of a variable; CudaError
[[nodiscard]] DeviceLimits read_device_limits(int device);

/// Returns DeviceLimits::shared_bytes of the current device.
[[nodiscard]] int shared_bytes_of_block();

}  // namespace waybill::cuda
