#pragma once

namespace waybill::cuda {

/// What bulk copies need of a block's shared memory: rings of rows. Devices with less move rows
/// with loads and stores of the threads.
inline constexpr int bulk_shared_bytes = 227 * 1024;

/// The limits that kernels may count on. Tests lower them by max_shared_kb and no_bulk_copies of
/// WAYBILL_TEST (core/test_hooks.h).
struct DeviceLimits {
  int shared_bytes = 0;  ///< of a block, where a kernel asks for more than 48 KiB
  bool bulk_copies =
      false;  ///< the device has them and room, and the kernels that it loaded do too
};

/// Asks the device, and the kernels as they are loaded there: those of PTX for older devices would
/// lack bulk copies. What shared_bytes_of_block() gives from now on.
/// @throws Unsupported when no kernel of this build runs on the device; InvalidArgument for a value
///   of a variable; CudaError
[[nodiscard]] DeviceLimits read_device_limits(int device);

/// DeviceLimits::shared_bytes of the current device.
[[nodiscard]] int shared_bytes_of_block();

}  // namespace waybill::cuda
