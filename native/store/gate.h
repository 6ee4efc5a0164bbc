// The challenge that precedes any other byte if the server has a token. The client's half and the
// reasons are in src/rallypoint/store/token.py.
//
//   client                                   server
//   "RLYPT-1\n", 32 random bytes      ->
//                                     <-     32 random bytes
//   HMAC("client", both)              ->
//                                     <-     HMAC("server", both), and the stock wire begins
#pragma once

#include <string>
#include <string_view>

#include "sha256.h"
#include "store/output.h"

namespace rallypoint::store {

inline constexpr std::string_view kGreeting = "RLYPT-1\n";
inline constexpr uint32_t kTokenRefused = 0xF5DE0001;  // sent before closing: it helps honest users
inline constexpr size_t kNonce = 32;

class Gate {
 public:
  enum class Outcome { kIncomplete, kPassed, kRefused };

  // Looks at `bytes` from where it stopped, adds to `consumed` what it took, answers to `output`.
  Outcome feed(std::string_view token, std::string_view nonce, std::string_view bytes,
               size_t& consumed, Output& output);

  const char* refusal() const { return refusal_; }

 private:
  std::string nonces_;  // the client's, then ours; empty before the greeting
  const char* refusal_ = nullptr;
};

}  // namespace rallypoint::store
