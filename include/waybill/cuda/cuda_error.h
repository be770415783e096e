#pragma once

#include "waybill/core/error.h"

namespace waybill {

/// A CUDA call failed. The text names the verb, the error and the device.
class CudaError : public Error {
 public:
  using Error::Error;
};

}  // namespace waybill
