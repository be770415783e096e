#include "transport/bootstrap/wire.h"

namespace waybill::detail {

std::string peer_text(std::string_view text, std::size_t max_bytes) {
  std::string printable(text.substr(0, max_bytes));
  for (std::size_t i = 0; i < printable.size(); ++i) {
    const auto byte = static_cast<unsigned char>(printable[i]);
    const auto before = i == 0 ? 0U : static_cast<unsigned char>(printable[i - 1]);
    if (byte < 0x20 || byte == 0x7F) {
      printable[i] = ' ';
    } else if (before == 0xC2 && byte >= 0x80 && byte < 0xA0) {  // U+0080..U+009F
      printable[i - 1] = printable[i] = ' ';
    }
  }
  if (printable.size() < text.size()) printable += "...";
  return printable;
}

std::string quoted_or_none(std::string_view text) {
  if (text.empty()) return "none";
  return '"' + peer_text(text) + '"';
}

}  // namespace waybill::detail
