#include "waybill/core/text_part.h"

#include <sstream>

namespace waybill {

void TextPart::write(std::ostream& out) const {
  switch (kind_) {
    case Kind::integer:
      out << integer_;
      return;
    case Kind::natural:
      out << natural_;
      return;
    case Kind::real:
      out << real_;
      return;
    case Kind::character:
      out << character_;
      return;
    case Kind::text:
      out.write(text_.data, static_cast<std::streamsize>(text_.size));
      return;
    case Kind::object:
      object_.write(out, object_.value);
      return;
  }
}

std::string detail::join_parts(std::initializer_list<TextPart> parts) {
  std::ostringstream text;
  for (const TextPart& part : parts) part.write(text);
  return std::move(text).str();
}

}  // namespace waybill
