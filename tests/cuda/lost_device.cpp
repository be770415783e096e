// Ends the process after a test that has lost its device. A fault on a GPU takes the device from
// all tests that follow in the process; each of them would fail for nothing. scripts/run_gtest.py
// knows the exit status, and goes on in a new process.

#include <cuda.h>
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

namespace waybill::test {
namespace {

constexpr int lost_device_status = 76;

/// A function of the driver, where the driver is loaded. Asking for it initializes nothing: tests
/// that start processes must not have used CUDA.
template <class Function>
Function* of_driver(void* driver, const char* name) {
  return reinterpret_cast<Function*>(dlsym(driver, name));
}

/// Whether a primary context of this process no longer answers.
bool has_lost_a_device() {
  void* const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  if (driver == nullptr) return false;
  const auto count_of = of_driver<decltype(cuDeviceGetCount)>(driver, "cuDeviceGetCount");
  const auto state_of =
      of_driver<decltype(cuDevicePrimaryCtxGetState)>(driver, "cuDevicePrimaryCtxGetState");
  const auto retain =
      of_driver<decltype(cuDevicePrimaryCtxRetain)>(driver, "cuDevicePrimaryCtxRetain");
  const auto release =
      of_driver<decltype(cuDevicePrimaryCtxRelease)>(driver, "cuDevicePrimaryCtxRelease_v2");
  const auto push = of_driver<decltype(cuCtxPushCurrent)>(driver, "cuCtxPushCurrent_v2");
  const auto pop = of_driver<decltype(cuCtxPopCurrent)>(driver, "cuCtxPopCurrent_v2");
  const auto query = of_driver<decltype(cuStreamQuery)>(driver, "cuStreamQuery");
  int num_devices = 0;
  if (count_of(&num_devices) != CUDA_SUCCESS) return false;
  bool lost = false;
  for (CUdevice device = 0; device < num_devices && !lost; ++device) {
    unsigned int flags = 0;
    int is_active = 0;
    if (state_of(device, &flags, &is_active) != CUDA_SUCCESS || is_active == 0) continue;
    CUcontext context = nullptr;
    if (retain(&context, device) != CUDA_SUCCESS) return true;
    const CUresult pushed = push(context);
    const CUresult found = pushed == CUDA_SUCCESS ? query(nullptr) : pushed;
    lost = found != CUDA_SUCCESS && found != CUDA_ERROR_NOT_READY;
    if (pushed == CUDA_SUCCESS) (void)pop(&context);
    (void)release(device);
  }
  return lost;
}

class EndsWithItsDevice : public testing::EmptyTestEventListener {
  void OnTestEnd(const testing::TestInfo& test) override {
    ++num_ended_;
    const testing::UnitTest& all = *testing::UnitTest::GetInstance();
    if (test.result()->Failed() || num_ended_ == all.test_to_run_count() || !has_lost_a_device()) {
      return;
    }
    // GoogleTest's printer hears of an end after this.
    std::printf("[       OK ] %s.%s (%lld ms)\n", test.test_suite_name(), test.name(),
                static_cast<long long>(test.result()->elapsed_time()));
    std::printf("The device is lost: this process ends, %d tests are left.\n",
                all.test_to_run_count() - num_ended_);
    std::fflush(nullptr);
    std::_Exit(lost_device_status);
  }

  int num_ended_ = 0;
};

[[maybe_unused]] const bool is_listening = [] {
  testing::UnitTest::GetInstance()->listeners().Append(new EndsWithItsDevice);
  return true;
}();

}  // namespace
}  // namespace waybill::test
