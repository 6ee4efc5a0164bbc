#include "store/gate.h"

#include <algorithm>

namespace rallypoint::store {

Gate::Outcome Gate::feed(std::string_view token, std::string_view nonce, std::string_view bytes,
                         size_t& consumed, Output& output) {
  if (nonces_.empty()) {
    const size_t known = std::min(bytes.size(), kGreeting.size());
    if (bytes.substr(0, known) != kGreeting.substr(0, known)) {
      output.add_u32(kTokenRefused);
      refusal_ = "no token, though this store demands one";
      return Outcome::kRefused;
    }
    if (bytes.size() < kGreeting.size() + kNonce) return Outcome::kIncomplete;
    nonces_.assign(bytes.substr(kGreeting.size(), kNonce));
    nonces_.append(nonce);
    output.add(nonce);
    bytes.remove_prefix(kGreeting.size() + kNonce);
    consumed += kGreeting.size() + kNonce;
  }
  if (bytes.size() < sizeof(Digest)) return Outcome::kIncomplete;
  const Digest expected = hmac_sha256(token, "client" + nonces_);
  if (!equal_in_constant_time(bytes.substr(0, sizeof(Digest)), view(expected))) {
    output.add_u32(kTokenRefused);
    refusal_ = "a wrong token";
    return Outcome::kRefused;
  }
  output.add(view(hmac_sha256(token, "server" + nonces_)));
  consumed += sizeof(Digest);
  return Outcome::kPassed;
}

}  // namespace rallypoint::store
