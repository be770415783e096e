#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string_view>
#include <vector>

namespace waybill::cli {

/// Counts the tokens of a text that comes in pieces. The rule: a token is a run of letters and
/// digits, or one other visible character; white space separates. Letters are those of ASCII and
/// all code points from U+0080 on, except that Chinese, Japanese and Korean characters are a token
/// each. What is no UTF-8, or holds control characters other than white space, is no text.
class TokenCounter {
 public:
  void add(std::string_view bytes);

  /// False once it is certain that the bytes are no text.
  [[nodiscard]] bool is_text() const { return is_text_; }

  /// Tokens so far; none when the bytes were no text.
  [[nodiscard]] std::optional<std::int64_t> finish() const;

 private:
  void add_code_point(std::uint32_t code_point);

  std::int64_t num_tokens_ = 0;
  bool in_word_ = false;
  bool is_text_ = true;
  std::uint32_t partial_ = 0;  // code point of which bytes are missing
  int num_missing_ = 0;
  std::uint32_t smallest_ = 0;  // that needs as many bytes
};

struct Corpus {
  std::vector<std::int64_t> lengths;  ///< tokens of each text file, in the order of the paths
  std::int64_t num_bytes = 0;         ///< of these files
  std::int64_t num_empty = 0;         ///< text files without tokens
  std::int64_t num_binary = 0;
  std::int64_t num_unreadable = 0;
};

/// Counts every regular file below `folder`. Links and what begins with a dot are passed over.
/// @throws IoError when `folder` is no folder or cannot be read.
[[nodiscard]] Corpus read_corpus(const std::filesystem::path& folder);

}  // namespace waybill::cli
