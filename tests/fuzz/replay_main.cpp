// Runs the files of the given folders through a fuzz target, without a fuzzer.

#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <string>

#include "waybill/json/file.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

int main(int argc, char** argv) {
  int num_files = 0;
  std::string current;
  try {
    for (int i = 1; i < argc; ++i) {
      for (const auto& entry : std::filesystem::directory_iterator(argv[i])) {
        current = entry.path().string();
        const std::string text = waybill::read_file(entry.path());
        LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(text.data()), text.size());
        ++num_files;
      }
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", current.c_str(), error.what());
    return 1;
  }
  std::printf("replayed %d inputs\n", num_files);
  return num_files > 0 ? 0 : 1;
}
