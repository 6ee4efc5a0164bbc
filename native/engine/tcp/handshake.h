// How two ranks prove to each other, over a new connection, that they are of the same group. The
// same as process_group/formation/mesh.py does while a group forms, and explains.
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

// What the connections of a group are recognised by.
struct Admission {
  std::string secret;  // the group's, and a digest of the job's token
  std::string name;

  std::string key(std::uint32_t caller, std::uint32_t listener, std::uint32_t purpose) const;
};

class Handshake {
 public:
  // A call of rank `self` to `peer`.
  Handshake(const Admission& admission, std::uint32_t self, std::uint32_t peer,
            std::uint32_t purpose);
  // Somebody calls rank `self`.
  Handshake(const Admission& admission, std::uint32_t self);

  enum class Step {
    going_on,
    proven,   // to a listener: the caller is who it says; `accept` lets it in
    done,     // all that is to be read has been; it is over once `unsent` has gone
    refused,  // the other side is not who it should be
  };
  // How many bytes are to be read next; all of them are handed to `feed`.
  std::size_t wanted() const { return wanted_; }
  Step feed(std::string_view bytes);
  void accept();

  std::string unsent;
  // Whether the other side may take the connection for made without hearing more from this one.
  bool has_proved_itself() const { return has_proved_itself_; }
  // A listener knows these once the caller is proven.
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
