// Two ranks prove to each other, over a new connection, that they belong to the same group. It is
// the handshake of process_group/formation/mesh.py, which explains it; that one is for groups being
// formed.
//
//   caller                                      listener
//   greeting, its rank, what for, 32 random bytes   ->
//                                               <-   32 random bytes
//   HMAC-SHA256(key, "client", both)           ->
//                                               <-   HMAC-SHA256(key, "server", both)
//
// It knows no socket: bytes go in and come out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace rallypoint::tcp {

// The identity of a group's connections.
struct Admission {
  std::string secret;  // the group's, and a digest of the job's token
  std::string name;

  std::string key(std::uint32_t caller, std::uint32_t listener, std::uint32_t purpose) const;
};

class Handshake {
 public:
  // Rank `self` calls `peer`.
  Handshake(const Admission& admission, std::uint32_t self, std::uint32_t peer,
            std::uint32_t purpose);
  // A caller connects to rank `self`.
  Handshake(const Admission& admission, std::uint32_t self);

  enum class Step {
    going_on,
    proven,   // for a listener: the caller has proved its identity; `accept` admits it
    done,     // everything has been read; it is over once `unsent` has been sent
    refused,  // the other side failed to prove its identity
  };
  // The number of bytes to read next and pass to `feed`.
  std::size_t wanted() const { return wanted_; }
  Step feed(std::string_view bytes);
  void accept();

  std::string unsent;
  // Whether the other side may use the connection without hearing more from this one.
  bool has_proved_itself() const { return has_proved_itself_; }
  // For a listener, these are known once the caller is proven.
  std::uint32_t peer() const { return peer_; }
  std::uint32_t purpose() const { return purpose_; }

 private:
  Step feed_caller(std::string_view bytes);
  Step feed_listener(std::string_view bytes);
  std::string proof(std::string_view role) const;

  const Admission& admission_;
  bool calls_;
  std::uint32_t self_;
  std::uint32_t peer_ = 0;
  std::uint32_t purpose_ = 0;
  std::size_t wanted_ = 0;
  bool has_proved_itself_ = false;
  bool has_nonces_ = false;
  std::string nonces_;  // the caller's, then the listener's
  std::string key_;
};

}  // namespace rallypoint::tcp
