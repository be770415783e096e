#pragma once

namespace waybill::cuda {

/// Bulk copies need so much of a block's shared memory for rings of rows. Devices with less move
/// rows with loads and stores of the threads.
inline constexpr int bulk_shared_bytes = 227 * 1024;

/// Reads the shared memory that a block may have if a kernel asks for more than 48 KiB. From now on
/// shared_bytes_of_block() returns this value. Tests lower it by max_shared_kb of WAYBILL_TEST
/// (core/test_hooks.h). @throws InvalidArgument for a value of a variable; CudaError
int read_shared_bytes(int device);

/// Returns it for the current device.
[[nodiscard]] int shared_bytes_of_block();

/// Says whether the device has bulk copies and room for them, and the kernels that it has loaded do
/// too: those of PTX for older devices lack them. Tests refuse them by no_bulk_copies.
/// @throws Unsupported when no kernel of this build runs on the device; as read_shared_bytes
[[nodiscard]] bool has_bulk_copies(int device);

}  // namespace waybill::cuda
