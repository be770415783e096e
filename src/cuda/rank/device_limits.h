#pragma once

namespace waybill::cuda {

/// Bulk copies need so much of a block's shared memory for rings of rows. Devices with less move
/// rows with loads and stores of the threads.
inline constexpr int bulk_shared_bytes = 227 * 1024;

/// The limits of a device for kernels. Two environment variables lower them for tests, as if the
/// device had less shared memory, WAYBILL_MAX_SHARED_KB (48 and more), or no bulk copies,
/// WAYBILL_VECTOR_PATH=1.
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
