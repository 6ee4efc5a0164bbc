// Reads JSON that another library wrote, from front to back, trusting nothing in it.
//
// The first error ends the reading: from then on every call fails. Only values that the caller asks
// for are kept; unknown ones are skipped.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace rallypoint {

class JsonReader {
 public:
  explicit JsonReader(std::string_view text) : text_(text) {}

  bool is_good() const { return is_good_; }
  // Whether the whole text has been read.
  bool is_at_end();

  // Calls `member(key)` for each, which must read or skip its value.
  template <typename Member>
  bool object(Member member) {
    if (!enter('{')) return false;
    std::string key;
    for (bool is_first = true; more('}', is_first); is_first = false) {
      if (!string(key) || !take(':')) return fail();
      member(std::string_view(key));
      if (!is_good_) return false;
    }
    return leave();
  }
  // Calls `item()` for each, which must read or skip it.
  template <typename Item>
  bool array(Item item) {
    if (!enter('[')) return false;
    for (bool is_first = true; more(']', is_first); is_first = false) {
      item();
      if (!is_good_) return false;
    }
    return leave();
  }
  bool string(std::string& value);  // at most kLongest bytes of it; an escaped character is a '?'
  bool integer(std::int64_t& value);
  bool boolean(bool& value);
  bool skip();
  bool starts_with(char first);  // the next value

  static constexpr std::size_t kLongest = 256;

 private:
  static constexpr unsigned kDeepest = 16;

  void space();
  bool take(char expected);
  bool enter(char opening);
  bool leave();
  bool more(char closing, bool is_first);
  bool word(std::string_view expected);
  bool is_escape() const;
  std::size_t digits();
  std::string_view number(bool is_any);
  bool fail() {
    is_good_ = false;
    return false;
  }

  std::string_view text_;
  std::size_t at_ = 0;
  unsigned depth_ = 0;
  bool is_good_ = true;
};

}  // namespace rallypoint
