// The store's parser, however requests are split, and its table against std::map.

#include <cstring>
#include <map>
#include <string>
#include <string_view>

#include "store/table.h"
#include "store/wire.h"
#include "tests/unit/cases.h"

namespace {

using namespace rallypoint::store;
using rallypoint::tests::chance;

std::string number(std::uint64_t value) {
  std::string bytes(sizeof value, '\0');
  std::memcpy(bytes.data(), &value, sizeof value);
  return bytes;
}

std::string blob(const std::string& content) { return number(content.size()) + content; }

std::string request(Opcode opcode, const std::string& rest) {
  return std::string(1, static_cast<char>(opcode)) + rest;
}

// What has been understood, in words.
std::string describe(const Request& each) {
  std::string text =
      std::to_string(static_cast<int>(each.opcode)) + " " + std::to_string(each.number);
  for (const std::string_view key : each.keys) text += " key " + std::string(key);
  for (const std::string_view value : each.values) text += " value " + std::string(value);
  return text + "\n";
}

// The parser's result for `bytes` that arrive in two pieces.
std::string parse(const std::string& bytes, std::size_t cut) {
  Parser parser;
  std::string text;
  std::size_t begin = 0;
  for (const std::size_t end : {cut, bytes.size()}) {
    for (;;) {
      Request found;
      const auto outcome = parser.next(std::string_view(bytes).substr(begin, end - begin), found);
      if (outcome == Parser::Outcome::kViolation) return text + parser.violation();
      if (outcome == Parser::Outcome::kIncomplete) break;
      text += describe(found);
      begin += parser.consumed();
    }
  }
  return text + (begin == bytes.size() ? "" : "and more");
}

CASE(requests_are_the_same_however_they_are_cut) {
  const std::string bytes =
      request(Opcode::kSet, blob("name") + blob("a value")) +
      request(Opcode::kAdd, blob("count") + number(7)) +
      request(Opcode::kMultiGet, number(2) + blob("a") + blob("bc")) +
      request(Opcode::kMultiSet, number(2) + blob("a") + blob("1") + blob("b") + blob("")) +
      request(Opcode::kNumKeys, "");
  const std::string expected =
      "1 0 key name value a value\n"
      "4 7 key count\n"
      "10 0 key a key bc\n"
      "11 0 key a key b value 1 value \n"
      "7 0\n";
  for (std::size_t cut = 0; cut <= bytes.size(); ++cut) CHECK_EQUAL(parse(bytes, cut), expected);
}

CASE(lengths_are_bounded_before_memory_is_taken) {
  const std::string requests[] = {
      request(Opcode::kGet, number(kMaxKey + 1)),
      request(Opcode::kSet, blob("key") + number(kMaxValue + 1)),
      request(Opcode::kMultiGet, number(kMaxCount + 1)),
      request(Opcode::kGet, number(~std::uint64_t{0})),
      std::string(1, '\x63'),
  };
  for (const std::string& each : requests) {
    Parser parser;
    Request found;
    CHECK(parser.next(each, found) == Parser::Outcome::kViolation);
    CHECK(parser.violation() != nullptr);
  }
  // The largest that is allowed is only not complete yet.
  Parser parser;
  Request found;
  CHECK(parser.next(request(Opcode::kGet, number(kMaxKey)), found) == Parser::Outcome::kIncomplete);
}

CASE(the_table_is_a_map) {
  for (int round = 0; round < 20; ++round) {
    KeyTable table;
    std::map<std::string, std::string> expected;
    const std::uint64_t keys = 1 + chance()() % 400;
    for (int step = 0; step < 3000; ++step) {
      const std::string key = "key/" + std::to_string(chance()() % keys);
      switch (chance()() % 4) {
        case 0:
          CHECK_EQUAL(table.erase(key), expected.erase(key) == 1);
          break;
        case 1: {
          const Entry* found = table.find(key);
          const auto there = expected.find(key);
          CHECK_EQUAL(found != nullptr, there != expected.end());
          if (found != nullptr && there != expected.end())
            CHECK_EQUAL(found->value.view(), std::string_view(there->second));
          break;
        }
        default: {
          const std::string value(chance()() % 40, 'v');
          table.find_or_insert(key).value = Value(value);
          expected[key] = value;
        }
      }
    }
    CHECK_EQUAL(table.size(), expected.size());
    std::map<std::string, std::string> found;
    table.for_each([&](const Entry& entry) { found.emplace(entry.key(), entry.value.view()); });
    CHECK(found == expected);
    table.clear();
    CHECK_EQUAL(table.size(), 0U);
    CHECK(table.find("key/0") == nullptr);
  }
}

CASE(values_are_shared_until_one_changes) {
  Value one(std::string_view("abc"));
  Value other = one;
  CHECK(one.view().data() == other.view().data());
  other.append("def");
  CHECK_EQUAL(one.view(), std::string_view("abc"));
  CHECK_EQUAL(other.view(), std::string_view("abcdef"));
  const char* const place = other.view().data();
  other.assign("uvwxyz");  // as long as before, and nobody else's
  CHECK(other.view().data() == place);
  CHECK_EQUAL(other.view(), std::string_view("uvwxyz"));
  Value third = other;
  other.assign("UVWXYZ");
  CHECK_EQUAL(third.view(), std::string_view("uvwxyz"));
}

}  // namespace
