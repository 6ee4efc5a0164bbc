// The store's wire format: bytes -> requests, however the bytes are split. The definition is
// tests/store_twin/messages.py; the tables here are the same. Pure: no sockets, no
// clock.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace rallypoint::store {

inline constexpr uint32_t kMagic = 0x3C85F7CE;
inline constexpr uint32_t kProbe = 0xF5A10001;
inline constexpr uint32_t kProbeAnswer = 0xF5A1AC01;
inline constexpr uint64_t kMaxKey = 8192;
inline constexpr uint64_t kMaxValue = 8 << 20;
inline constexpr uint64_t kMaxCount = 131072;
inline constexpr uint64_t kMaxRequest = 256 << 20;
inline constexpr uint64_t kMaxAppended = 1 << 30;

enum class Opcode : uint8_t {
  kValidate = 0,
  kSet = 1,
  kCompareSet = 2,
  kGet = 3,
  kAdd = 4,
  kCheck = 5,
  kWait = 6,
  kNumKeys = 7,
  kDeleteKey = 8,
  kAppend = 9,
  kMultiGet = 10,
  kMultiSet = 11,
  kCancelWait = 12,
  kPing = 13,
  kQueuePush = 14,
  kQueuePop = 15,
  kQueueLen = 16,
  kListKeys = 17,
  kBarrier = 18,
  kWaitGet = 64,
  kQueueTake = 65,
  kSetEphemeral = 66,
  kWatch = 67,
  kEnter = 68,
};

enum class Status : uint8_t { kReply = 0, kError = 1, kEvent = 2, kCanceled = 3 };
enum class ErrorCode : uint8_t { kNotANumber = 1, kFenced = 2 };
enum class EventKind : uint8_t { kSet = 0, kDeleted = 1, kFenced = 2 };

// One request. The views point into the bytes that the parser was given last.
struct Request {
  Opcode opcode{};
  int64_t number = 0;
  std::vector<std::string_view> keys;
  std::vector<std::string_view> values;

  std::string_view key() const { return keys[0]; }
  std::string_view value() const { return values[0]; }
};

// Finds where requests end. It owns no bytes: it remembers offsets from the start of the request in
// progress, so each byte is examined once, and the caller may move its buffer between calls.
class Parser {
 public:
  enum class Outcome { kIncomplete, kRequest, kViolation };

  // `bytes` starts where the last request ended; it holds what was there before, and more.
  Outcome next(std::string_view bytes, Request& request);

  size_t consumed() const { return consumed_; }         // after kRequest
  const char* violation() const { return violation_; }  // after kViolation
  bool in_progress() const { return stage_ != 0; }

 private:
  struct Span {
    uint32_t start;
    uint32_t length;
    bool is_key;
  };
  enum class Field : uint8_t { kEnd, kKey, kValue, kNumber, kNonce, kKeys, kPairs };
  using Layout = std::array<Field, 3>;

  static const Layout* layout_of(uint8_t opcode);
  bool take(std::string_view bytes, size_t size);
  bool take_length(std::string_view bytes, uint64_t limit, const char* text, uint64_t& length);
  bool take_blob(std::string_view bytes, bool is_key);
  bool take_field(std::string_view bytes, Field field);
  bool take_list(std::string_view bytes, bool with_values);
  void deliver(std::string_view bytes, Request& request);

  const char* violation_ = nullptr;
  size_t read_ = 0;  // bytes of the request in progress that are decoded
  size_t consumed_ = 0;
  int64_t number_ = 0;
  uint64_t blob_length_ = 0;
  uint64_t blobs_left_ = 0;
  std::vector<Span> spans_;
  uint8_t stage_ = 0;  // 0: opcode next; n: the n-th field of its layout next
  bool in_blob_ = false;
  bool in_list_ = false;
  uint8_t opcode_ = 0;
};

}  // namespace rallypoint::store
