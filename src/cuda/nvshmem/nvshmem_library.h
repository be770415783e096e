#pragma once

#include "nvshmem_api.h"

namespace waybill::cuda {

/// Loads libwaybill_nvshmem.so, once a process: the file that WAYBILL_NVSHMEM_LIBRARY names, else
/// the one beside this program or library, else where the system looks. NVSHMEM itself comes from
/// NVSHMEM_HOME/lib where that is set, else from where it was at build time or where the system
/// looks.
/// @throws Unsupported saying what was tried and what to do
[[nodiscard]] const NvshmemApi& nvshmem_api();

}  // namespace waybill::cuda
