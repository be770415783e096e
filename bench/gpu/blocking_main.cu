// Which CUDA calls of one thread wait while the kernel of another runs: where ranks are threads, a
// call that waits for a kernel that waits for the caller's next kernel never returns.

#include <cuda_runtime.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace {

constexpr std::uint64_t longest_ns = 150'000'000;  // that the kernel runs
constexpr std::size_t mib = std::size_t{1} << 20;

void check(cudaError_t status, const char* doing) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "blocking: %s: %s\n", doing, cudaGetErrorString(status));
  std::exit(1);
}

__global__ void run_until(const volatile int* flag, std::uint64_t most_ns) {
  std::uint64_t start = 0;
  std::uint64_t now = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  while (*flag == 0) {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    if (now - start > most_ns) return;
  }
}

__global__ void nothing() {}

/// What the thread that has launched the kernel does next.
struct Waiter {
  const char* name;
  std::function<void(cudaStream_t)> wait;
};

/// What the other thread does meanwhile.
struct Call {
  const char* name;
  std::function<void()> call;
};

/// Memory and streams of the two threads.
struct Setup {
  Setup(int first, int second) : first_device(first), second_device(second) {
    for (const int device : {second, first}) {
      check(cudaSetDevice(device), "choosing a device");
      const int other = device == first ? second : first;
      if (device != other && cudaDeviceEnablePeerAccess(other, 0) != cudaSuccess) {
        (void)cudaGetLastError();
      }
    }
    check(cudaHostAlloc(&flag, sizeof(int), cudaHostAllocPortable | cudaHostAllocMapped), "memory");
    check(cudaHostAlloc(&pinned, mib, cudaHostAllocPortable), "memory");
    check(cudaMalloc(&first_memory, mib), "memory");
    check(cudaStreamCreateWithFlags(&first_stream, cudaStreamNonBlocking), "a stream");
    check(cudaSetDevice(second), "choosing a device");
    check(cudaMalloc(&memory, 2 * mib), "memory");
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream");
    cudaFuncAttributes unused{};
    for (const int device : {first, second}) {
      check(cudaSetDevice(device), "choosing a device");
      check(cudaFuncGetAttributes(&unused, nothing), "loading");
      check(cudaFuncGetAttributes(&unused, run_until), "loading");
    }
    check(cudaDeviceSynchronize(), "getting ready");
  }

  /// Milliseconds that the call took while the kernel ran.
  double time(const Waiter& waiter, const Call& call) const {
    *static_cast<volatile int*>(flag) = 0;
    std::atomic<bool> launched = false;
    std::jthread other([&] {
      check(cudaSetDevice(first_device), "choosing a device");
      run_until<<<1, 1, 0, first_stream>>>(static_cast<int*>(flag), longest_ns);
      check(cudaGetLastError(), "launching");
      launched = true;
      waiter.wait(first_stream);
      check(cudaStreamSynchronize(first_stream), "waiting");
    });
    while (!launched) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    check(cudaSetDevice(second_device), "choosing a device");
    const auto start = std::chrono::steady_clock::now();
    call.call();
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
    *static_cast<volatile int*>(flag) = 1;
    return took.count();
  }

  void synchronize() const { check(cudaStreamSynchronize(stream), "waiting"); }

  int first_device;
  int second_device;
  void* flag = nullptr;
  void* pinned = nullptr;
  void* first_memory = nullptr;
  void* memory = nullptr;
  cudaStream_t first_stream = nullptr;
  cudaStream_t stream = nullptr;
};

std::vector<Waiter> waiters(Setup& s, std::vector<char>& pageable) {
  return {
      {"nothing", [](cudaStream_t) {}},
      {"stream sync", [](cudaStream_t at) { check(cudaStreamSynchronize(at), "waiting"); }},
      {"copy to pageable",
       [&](cudaStream_t at) {
         check(cudaMemcpyAsync(pageable.data(), s.first_memory, mib, cudaMemcpyDeviceToHost, at),
               "copying");
       }},
      {"8 B to pageable",
       [&](cudaStream_t at) {
         check(cudaMemcpyAsync(pageable.data(), s.first_memory, 8, cudaMemcpyDeviceToHost, at),
               "copying");
       }},
      {"copy to pinned",
       [&](cudaStream_t at) {
         check(cudaMemcpyAsync(s.pinned, s.first_memory, mib, cudaMemcpyDeviceToHost, at),
               "copying");
       }},
  };
}

std::function<void()> copies(const Setup& s, void* to, const void* from, std::size_t bytes) {
  return [&s, to, from, bytes] {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, s.stream), "copying");
    s.synchronize();
  };
}

std::vector<Call> copy_calls(Setup& s, std::vector<char>& pageable, void* pinned) {
  auto* const device = static_cast<char*>(s.memory);
  return {{"copy 8 B from pageable", copies(s, device, pageable.data(), 8)},
          {"copy 1 MiB from pageable", copies(s, device, pageable.data(), mib)},
          {"copy 1 MiB from pinned", copies(s, device, pinned, mib)},
          {"copy 8 B to pageable", copies(s, pageable.data(), device, 8)},
          {"copy 1 MiB to pageable", copies(s, pageable.data(), device, mib)},
          {"copy 1 MiB to pinned", copies(s, pinned, device, mib)},
          {"copy on the device", copies(s, device + mib, device, mib)},
          {"cudaMemcpy from pageable", [=, &pageable] {
             check(cudaMemcpy(device, pageable.data(), mib, cudaMemcpyDefault), "copying");
           }}};
}

/// A call that gives memory, once for each way of waiting, and one that takes the same back.
template <class Take, class Give>
std::vector<Call> pair_of(const char* take_name, Take take, const char* give_name, Give give) {
  const auto taken = std::make_shared<std::vector<void*>>();
  return {{take_name, [=] { taken->push_back(take()); }}, {give_name, [=] {
                                                             give(taken->back());
                                                             taken->pop_back();
                                                           }}};
}

std::vector<Call> memory_calls(Setup& s) {
  const auto take = [](std::size_t size) {
    return [size] {
      void* memory = nullptr;
      check(cudaMalloc(&memory, size), "memory");
      return memory;
    };
  };
  const auto take_pinned = [] {
    void* memory = nullptr;
    check(cudaHostAlloc(&memory, 65536, cudaHostAllocPortable | cudaHostAllocMapped), "memory");
    return memory;
  };
  const auto give = [](void* memory) { check(cudaFree(memory), "memory"); };
  const auto give_pinned = [](void* memory) { check(cudaFreeHost(memory), "memory"); };
  std::vector<Call> calls = pair_of("cudaMalloc 4 KiB", take(4096), "cudaFree 4 KiB", give);
  for (const auto& more : {pair_of("cudaMalloc 64 MiB", take(64 * mib), "cudaFree 64 MiB", give),
                           pair_of("cudaHostAlloc", take_pinned, "cudaFreeHost", give_pinned)}) {
    calls.insert(calls.end(), more.begin(), more.end());
  }
  calls.push_back({"cudaMallocAsync, cudaFreeAsync", [&s] {
                     void* memory = nullptr;
                     check(cudaMallocAsync(&memory, mib, s.stream), "memory");
                     check(cudaFreeAsync(memory, s.stream), "memory");
                     s.synchronize();
                   }});
  calls.push_back({"cudaMemsetAsync", [&s] {
                     check(cudaMemsetAsync(s.memory, 1, mib, s.stream), "filling");
                     s.synchronize();
                   }});
  calls.push_back({"cudaMemset", [&s] {
                     check(cudaMemset(s.memory, 1, mib), "filling");
                     check(cudaStreamSynchronize(nullptr), "filling");
                   }});
  return calls;
}

void run_graph(const Setup& s) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t ready = nullptr;
  check(cudaStreamBeginCapture(s.stream, cudaStreamCaptureModeThreadLocal), "capturing");
  nothing<<<1, 1, 0, s.stream>>>();
  check(cudaStreamEndCapture(s.stream, &graph), "capturing");
  check(cudaGraphInstantiate(&ready, graph, 0), "making a graph");
  check(cudaGraphLaunch(ready, s.stream), "replaying");
  s.synchronize();
  check(cudaGraphExecDestroy(ready), "a graph");
  check(cudaGraphDestroy(graph), "a graph");
}

std::vector<Call> other_calls(Setup& s) {
  return {{"kernel",
           [&s] {
             nothing<<<1, 1, 0, s.stream>>>();
             s.synchronize();
           }},
          {"graph: capture, make, launch", [&s] { run_graph(s); }},
          {"stream: make, destroy",
           [] {
             cudaStream_t stream = nullptr;
             check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream");
             check(cudaStreamDestroy(stream), "a stream");
           }},
          {"event: make, record, wait", [&s] {
             cudaEvent_t event = nullptr;
             check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "an event");
             check(cudaEventRecord(event, s.stream), "an event");
             check(cudaEventSynchronize(event), "an event");
             check(cudaEventDestroy(event), "an event");
           }}};
}

void run(int first, int second) {
  Setup setup(first, second);
  std::vector<char> first_pageable(mib);
  std::vector<char> pageable(mib);
  void* pinned = nullptr;
  check(cudaHostAlloc(&pinned, mib, cudaHostAllocPortable), "memory");
  std::vector<Call> calls = other_calls(setup);
  for (auto more : {copy_calls(setup, pageable, pinned), memory_calls(setup)}) {
    calls.insert(calls.end(), more.begin(), more.end());
  }
  const auto all = waiters(setup, first_pageable);
  std::printf(
      "kernel of %.0f ms on device %d; milliseconds of a call on device %d while the "
      "launching thread is in\n%-30s",
      longest_ns / 1e6, first, second, "");
  for (const Waiter& waiter : all) std::printf(" %17s", waiter.name);
  std::printf("\n");
  for (const Call& call : calls) {
    std::printf("%-30s", call.name);
    for (const Waiter& waiter : all) {
      const double ms = setup.time(waiter, call);
      std::printf(" %12.2f %4s", ms, ms * 1e6 > 0.8 * longest_ns ? "WAIT" : "");
      std::fflush(stdout);
    }
    std::printf("\n");
  }
}

}  // namespace

int main() {
  int gpus = 0;
  check(cudaGetDeviceCount(&gpus), "counting devices");
  run(0, 0);
  if (gpus > 1) run(0, 1);
  return 0;
}
