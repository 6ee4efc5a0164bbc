#include "store/wire.h"

#include <bit>
#include <cstring>

namespace rallypoint::store {

static_assert(std::endian::native == std::endian::little, "the wire is little-endian");

const Parser::Layout* Parser::layout_of(uint8_t opcode) {
  using enum Field;
  static constexpr std::array<Layout, 19> kStock = {{
      {kNonce},                // VALIDATE
      {kKey, kValue},          // SET
      {kKey, kValue, kValue},  // COMPARE_SET
      {kKey},                  // GET
      {kKey, kNumber},         // ADD
      {kKeys},                 // CHECK
      {kKeys},                 // WAIT
      {},                      // NUM_KEYS
      {kKey},                  // DELETE_KEY
      {kKey, kValue},          // APPEND
      {kKeys},                 // MULTI_GET
      {kPairs},                // MULTI_SET
      {},                      // CANCEL_WAIT
      {kNonce},                // PING
      {kKey, kValue},          // QUEUE_PUSH
      {kKey},                  // QUEUE_POP
      {kKey},                  // QUEUE_LEN
      {},                      // LIST_KEYS
      {kKey, kNumber},         // BARRIER
  }};
  static constexpr std::array<Layout, 5> kOurs = {{
      {kKeys},          // WAIT_GET
      {kKey},           // QUEUE_TAKE
      {kKey, kValue},   // SET_EPHEMERAL
      {kKey},           // WATCH
      {kKey, kNumber},  // ENTER
  }};
  constexpr uint8_t first_of_ours = static_cast<uint8_t>(Opcode::kWaitGet);
  if (opcode < kStock.size()) return &kStock[opcode];
  if (opcode >= first_of_ours && opcode < first_of_ours + kOurs.size()) {
    return &kOurs[opcode - first_of_ours];
  }
  return nullptr;
}

Parser::Outcome Parser::next(std::string_view bytes, Request& request) {
  if (stage_ == 0) {
    if (bytes.empty()) return Outcome::kIncomplete;
    opcode_ = static_cast<uint8_t>(bytes[0]);
    if (!layout_of(opcode_)) {
      violation_ = "an opcode that does not exist";
      return Outcome::kViolation;
    }
    read_ = 1;
    number_ = 0;
    stage_ = 1;
  }
  const Layout& layout = *layout_of(opcode_);
  while (stage_ <= layout.size() && layout[stage_ - 1] != Field::kEnd) {
    if (!take_field(bytes, layout[stage_ - 1])) {
      return violation_ ? Outcome::kViolation : Outcome::kIncomplete;
    }
    ++stage_;
  }
  deliver(bytes, request);
  return Outcome::kRequest;
}

bool Parser::take(std::string_view bytes, size_t size) {
  if (read_ + size > kMaxRequest) {
    violation_ = "a request larger than 256 MiB";
    return false;
  }
  if (bytes.size() < read_ + size) return false;
  read_ += size;
  return true;
}

bool Parser::take_length(std::string_view bytes, uint64_t limit, const char* text,
                         uint64_t& length) {
  if (!take(bytes, sizeof length)) return false;
  std::memcpy(&length, bytes.data() + read_ - sizeof length, sizeof length);
  if (length <= limit) return true;
  violation_ = text;
  return false;
}

bool Parser::take_blob(std::string_view bytes, bool is_key) {
  if (!in_blob_) {
    const bool fits =
        is_key ? take_length(bytes, kMaxKey, "a key longer than 8192 bytes", blob_length_)
               : take_length(bytes, kMaxValue, "a value larger than 8 MiB", blob_length_);
    if (!fits) return false;
    in_blob_ = true;
  }
  const size_t start = read_;
  if (!take(bytes, blob_length_)) return false;
  spans_.push_back({static_cast<uint32_t>(start), static_cast<uint32_t>(blob_length_), is_key});
  in_blob_ = false;
  return true;
}

bool Parser::take_list(std::string_view bytes, bool with_values) {
  if (!in_list_) {
    uint64_t count = 0;
    if (!take_length(bytes, kMaxCount, "more than 131072 keys in one request", count)) return false;
    blobs_left_ = with_values ? 2 * count : count;
    in_list_ = true;
  }
  while (blobs_left_ > 0) {
    const bool is_key = !with_values || blobs_left_ % 2 == 0;
    if (!take_blob(bytes, is_key)) return false;
    --blobs_left_;
  }
  in_list_ = false;
  return true;
}

bool Parser::take_field(std::string_view bytes, Field field) {
  switch (field) {
    case Field::kKey:
    case Field::kValue:
      return take_blob(bytes, field == Field::kKey);
    case Field::kKeys:
    case Field::kPairs:
      return take_list(bytes, field == Field::kPairs);
    case Field::kNumber:
      if (!take(bytes, sizeof number_)) return false;
      std::memcpy(&number_, bytes.data() + read_ - sizeof number_, sizeof number_);
      return true;
    case Field::kNonce: {
      uint32_t nonce = 0;
      if (!take(bytes, sizeof nonce)) return false;
      std::memcpy(&nonce, bytes.data() + read_ - sizeof nonce, sizeof nonce);
      number_ = nonce;
      return true;
    }
    case Field::kEnd:
      break;
  }
  return true;
}

void Parser::deliver(std::string_view bytes, Request& request) {
  request.opcode = static_cast<Opcode>(opcode_);
  request.number = number_;
  request.keys.clear();
  request.values.clear();
  for (const Span& span : spans_) {
    (span.is_key ? request.keys : request.values).push_back(bytes.substr(span.start, span.length));
  }
  consumed_ = read_;
  stage_ = 0;
  // Ten thousand idle connections must not each keep the spans of their largest request.
  if (spans_.capacity() > 16) {
    std::vector<Span>().swap(spans_);
  } else {
    spans_.clear();
  }
}

}  // namespace rallypoint::store
