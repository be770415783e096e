#include <algorithm>
#include <array>
#include <fstream>
#include <string>
#include <system_error>

#include "documents.h"
#include "waybill/core/error.h"

namespace waybill::cli {
namespace {

namespace fs = std::filesystem;

bool is_space(std::uint32_t c) {
  return c == ' ' || (c >= '\t' && c <= '\r') || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200B) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000 || c == 0xFEFF;
}

bool is_control(std::uint32_t c) { return c < 0x20 || c == 0x7F; }

// Scripts that are written without spaces.
bool stands_alone(std::uint32_t c) {
  return (c >= 0x2E80 && c <= 0xA4CF) || (c >= 0xAC00 && c <= 0xD7A3) ||
         (c >= 0xF900 && c <= 0xFAFF) || (c >= 0xFF00 && c <= 0xFFEF) ||
         (c >= 0x20000 && c <= 0x3FFFF);
}

bool is_word(std::uint32_t c) {
  return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') ||
         (c >= 0x80 && !stands_alone(c));
}

}  // namespace

void TokenCounter::add_code_point(std::uint32_t c) {
  if (is_space(c)) {
    in_word_ = false;
  } else if (is_control(c)) {
    is_text_ = false;
  } else if (is_word(c)) {
    if (!in_word_) ++num_tokens_;
    in_word_ = true;
  } else {
    ++num_tokens_;
    in_word_ = false;
  }
}

void TokenCounter::add(std::string_view bytes) {
  for (const char byte : bytes) {
    const auto b = static_cast<std::uint32_t>(static_cast<unsigned char>(byte));
    if (num_missing_ > 0) {
      is_text_ = is_text_ && (b & 0xC0U) == 0x80U;
      partial_ = (partial_ << 6U) | (b & 0x3FU);
      if (--num_missing_ > 0) continue;
      const bool surrogate = partial_ >= 0xD800 && partial_ <= 0xDFFF;
      is_text_ = is_text_ && partial_ >= smallest_ && partial_ <= 0x10FFFF && !surrogate;
      add_code_point(partial_);
    } else if (b < 0x80) {
      add_code_point(b);
    } else if (b >= 0xC2 && b < 0xF5) {
      num_missing_ = b < 0xE0 ? 1 : b < 0xF0 ? 2 : 3;
      partial_ = b & (0x3FU >> static_cast<unsigned>(num_missing_));
      smallest_ = num_missing_ == 1 ? 0x80 : num_missing_ == 2 ? 0x800 : 0x10000;
    } else {
      is_text_ = false;
    }
    if (!is_text_) return;
  }
}

std::optional<std::int64_t> TokenCounter::finish() const {
  if (!is_text_ || num_missing_ > 0) return std::nullopt;
  return num_tokens_;
}

namespace {

std::vector<fs::path> files_below(const fs::path& folder) {
  std::error_code error;
  if (!fs::is_directory(folder, error))
    throw IoError(concat(folder.string(), ": ", error ? error.message() : "is no folder"));
  std::vector<fs::path> files;
  const auto options = fs::directory_options::skip_permission_denied;
  fs::recursive_directory_iterator entry(folder, options, error);
  for (; !error && entry != fs::recursive_directory_iterator(); entry.increment(error)) {
    const bool hidden = entry->path().filename().string().starts_with('.');
    std::error_code ignored;
    if (hidden) {
      entry.disable_recursion_pending();
    } else if (entry->is_regular_file(ignored) && !entry->is_symlink(ignored)) {
      files.push_back(entry->path());
    }
  }
  if (error) throw IoError(concat(folder.string(), ": cannot list: ", error.message()));
  std::sort(files.begin(), files.end());
  return files;
}

void add_file(const fs::path& path, Corpus& corpus) {
  std::ifstream file(path, std::ios::binary);
  TokenCounter counter;
  std::array<char, 65536> buffer{};
  std::int64_t num_bytes = 0;
  while (file && counter.is_text()) {
    file.read(buffer.data(), static_cast<std::streamsize>(buffer.size()));
    counter.add({buffer.data(), static_cast<std::size_t>(file.gcount())});
    num_bytes += file.gcount();
  }
  const std::optional<std::int64_t> num_tokens = counter.finish();
  if (!file.is_open() || file.bad()) {
    ++corpus.num_unreadable;
  } else if (!num_tokens) {
    ++corpus.num_binary;
  } else if (*num_tokens == 0) {
    ++corpus.num_empty;
  } else {
    corpus.lengths.push_back(*num_tokens);
    corpus.num_bytes += num_bytes;
  }
}

}  // namespace

Corpus read_corpus(const fs::path& folder) {
  Corpus corpus;
  for (const fs::path& path : files_below(folder)) add_file(path, corpus);
  return corpus;
}

}  // namespace waybill::cli
