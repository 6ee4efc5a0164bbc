#include "engine/tcp/handshake.h"

#include <sys/random.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "sha256.h"

namespace rallypoint::tcp {
namespace {

constexpr std::string_view kGreeting = "RLYMSH1\n";
constexpr std::size_t kNonce = 32;
constexpr std::size_t kHead = 2 * sizeof(std::uint32_t);

std::string random_bytes() {
  std::array<char, kNonce> bytes;
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    throw std::system_error(errno, std::generic_category(), "getrandom");
  }
  return {bytes.data(), bytes.size()};
}

}  // namespace

std::string Admission::key(std::uint32_t caller, std::uint32_t listener,
                           std::uint32_t purpose) const {
  const std::string text = name + "/" + std::to_string(caller) + "/" + std::to_string(listener) +
                           "/" + std::to_string(purpose);
  return std::string(view(hmac_sha256(secret, text)));
}

Handshake::Handshake(const Admission& admission, std::uint32_t self, std::uint32_t peer,
                     std::uint32_t purpose)
    : admission_(admission),
      calls_(true),
      self_(self),
      peer_(peer),
      purpose_(purpose),
      wanted_(kNonce),
      nonces_(random_bytes()),
      key_(admission.key(self, peer, purpose)) {
  unsent = kGreeting;
  unsent.append(reinterpret_cast<const char*>(&self_), sizeof self_);
  unsent.append(reinterpret_cast<const char*>(&purpose_), sizeof purpose_);
  unsent += nonces_;
}

Handshake::Handshake(const Admission& admission, std::uint32_t self)
    : admission_(admission),
      calls_(false),
      self_(self),
      wanted_(kGreeting.size() + kHead + kNonce) {}

Handshake::Step Handshake::feed(std::string_view bytes) {
  return calls_ ? feed_caller(bytes) : feed_listener(bytes);
}

Handshake::Step Handshake::feed_caller(std::string_view bytes) {
  if (!has_nonces_) {
    has_nonces_ = true;
    nonces_ += bytes;
    unsent += proof("client");
    has_proved_itself_ = true;
    wanted_ = sizeof(Digest);
    return Step::going_on;
  }
  wanted_ = 0;
  return equal_in_constant_time(bytes, proof("server")) ? Step::done : Step::refused;
}

Handshake::Step Handshake::feed_listener(std::string_view bytes) {
  if (!has_nonces_) {
    if (!bytes.starts_with(kGreeting)) return Step::refused;
    bytes.remove_prefix(kGreeting.size());
    std::memcpy(&peer_, bytes.data(), sizeof peer_);
    std::memcpy(&purpose_, bytes.data() + sizeof peer_, sizeof purpose_);
    has_nonces_ = true;
    nonces_ = bytes.substr(kHead);
    const std::string ours = random_bytes();
    nonces_ += ours;
    unsent += ours;
    key_ = admission_.key(peer_, self_, purpose_);
    wanted_ = sizeof(Digest);
    return Step::going_on;
  }
  wanted_ = 0;
  return equal_in_constant_time(bytes, proof("client")) ? Step::proven : Step::refused;
}

void Handshake::accept() {
  unsent += proof("server");
  has_proved_itself_ = true;
}

std::string Handshake::proof(std::string_view role) const {
  return std::string(view(hmac_sha256(key_, std::string(role) + nonces_)));
}

}  // namespace rallypoint::tcp
