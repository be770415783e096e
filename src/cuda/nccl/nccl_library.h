#pragma once

#include <string>

#include "nccl_api.h"

namespace waybill::cuda {

/// Loads NCCL, once a process: the file that WAYBILL_NCCL_LIBRARY names, else the libnccl.so.2 that
/// the process has loaded already (as torch does), else the one in NCCL_HOME/lib, else where the
/// system looks.
/// @throws Unsupported saying what was tried and what to do, also for versions before 2.28
[[nodiscard]] const NcclApi& nccl_api();

/// 22809: "2.28.9".
[[nodiscard]] std::string nccl_version_text(int version);

}  // namespace waybill::cuda
