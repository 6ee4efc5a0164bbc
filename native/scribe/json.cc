#include "scribe/json.h"

#include <charconv>

namespace rallypoint {

bool JsonReader::is_at_end() {
  space();
  return is_good_ && at_ == text_.size();
}

void JsonReader::space() {
  while (at_ < text_.size() && std::string_view(" \t\r\n").find(text_[at_]) != text_.npos) ++at_;
}

bool JsonReader::starts_with(char first) {
  space();
  return is_good_ && at_ < text_.size() && text_[at_] == first;
}

bool JsonReader::take(char expected) {
  if (!starts_with(expected)) return fail();
  ++at_;
  return true;
}

bool JsonReader::enter(char opening) {
  if (depth_ == kDeepest || !take(opening)) return fail();
  ++depth_;
  return true;
}

bool JsonReader::leave() {
  --depth_;
  return is_good_;
}

// Whether another member follows; takes what stands before it, or the end.
bool JsonReader::more(char closing, bool is_first) {
  if (starts_with(closing)) {
    ++at_;
    return false;
  }
  return is_good_ && (is_first || take(','));
}

bool JsonReader::word(std::string_view expected) {
  if (text_.substr(at_, expected.size()) != expected) return fail();
  at_ += expected.size();
  return true;
}

bool JsonReader::string(std::string& value) {
  value.clear();
  if (!take('"')) return false;
  for (; at_ < text_.size(); ++at_) {
    char c = text_[at_];
    if (c == '"') {
      ++at_;
      return true;
    }
    if (static_cast<unsigned char>(c) < ' ') return fail();
    if (c == '\\') {
      if (++at_ == text_.size() || !is_escape()) return fail();
      c = text_[at_] == '"' || text_[at_] == '\\' || text_[at_] == '/' ? text_[at_] : '?';
    }
    if (value.size() < kLongest) value.push_back(c);
  }
  return fail();
}

// Whether what stands here may follow a backslash.
bool JsonReader::is_escape() const {
  if (text_[at_] != 'u') return std::string_view("\"\\/bfnrt").find(text_[at_]) != text_.npos;
  const std::string_view digits = text_.substr(at_ + 1, 4);
  return digits.size() == 4 && digits.find_first_not_of("0123456789abcdefABCDEF") == digits.npos;
}

std::size_t JsonReader::digits() {
  const std::size_t begin = at_;
  while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') ++at_;
  return at_ - begin;
}

// Goes past an integer, or with `is_any` also past another number; empty if there is none.
std::string_view JsonReader::number(bool is_any) {
  space();
  const std::size_t begin = at_;
  const auto is_at = [this](std::string_view any) {
    return at_ < text_.size() && any.find(text_[at_]) != any.npos;
  };
  if (is_at("-")) ++at_;
  const bool is_zero = is_at("0");
  const std::size_t count = digits();
  bool is_number = is_good_ && count > 0 && !(is_zero && count > 1);
  if (is_any && is_at(".")) {
    ++at_;
    is_number = digits() > 0 && is_number;
  }
  if (is_any && is_at("eE")) {
    ++at_;
    if (is_at("+-")) ++at_;
    is_number = digits() > 0 && is_number;
  }
  return is_number ? text_.substr(begin, at_ - begin) : std::string_view();
}

bool JsonReader::integer(std::int64_t& value) {
  const std::string_view text = number(false);
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return !text.empty() && error == std::errc() ? true : fail();
}

bool JsonReader::boolean(bool& value) {
  value = starts_with('t');
  return is_good_ && word(value ? "true" : "false");
}

bool JsonReader::skip() {
  space();
  if (!is_good_ || at_ == text_.size()) return fail();
  std::string ignored;
  switch (text_[at_]) {
    case '{':
      return object([this](std::string_view) { skip(); });
    case '[':
      return array([this] { skip(); });
    case '"':
      return string(ignored);
    case 't':
      return word("true");
    case 'f':
      return word("false");
    case 'n':
      return word("null");
    default:
      break;
  }
  return !number(true).empty() || fail();
}

}  // namespace rallypoint
