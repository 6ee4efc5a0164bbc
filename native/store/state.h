// The server's behaviour for each request. The definition is tests/store_twin/state.py, and
// tests hold the two together. Pure: connections are ids, replies go into their Output, times are
// arguments. One thread only.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "store/keyspace.h"
#include "store/output.h"
#include "store/wire.h"

namespace rallypoint::store {

// Where replies go. Implemented by the owner of the connections.
class Outbox {
 public:
  virtual Output& output(ConnectionId connection) = 0;

 protected:
  ~Outbox() = default;
};

class State {
 public:
  explicit State(Outbox& outbox) : outbox_(outbox), default_(std::make_shared<Keyspace>()) {}

  void connect(ConnectionId connection, double now);
  // Returns null, or why the connection must be closed; `disconnect` is still due then.
  const char* handle(ConnectionId connection, const Request& request);
  void disconnect(ConnectionId connection);
  // Those that have not introduced themselves in time.
  std::vector<ConnectionId> late(double now) const;

  bool owns_ephemeral(ConnectionId connection) const { return clients_[connection].ephemeral; }
  // A watcher that did not read what it was sent; it must be closed.
  bool lost_events(ConnectionId connection) const { return clients_[connection].lost_events; }
  bool validated(ConnectionId connection) const { return clients_[connection].validated; }
  size_t keys() const { return default_->table.size(); }

 private:
  struct Client {
    double since = 0;
    bool connected = false;
    bool validated = false;
    bool tagged = false;
    bool waiting = false;
    bool ephemeral = false;
    bool lost_events = false;
    Opcode waits_with{};
    uint32_t missing = 0;
    std::vector<std::string> asked;  // the keys of the wait, each once where order is free
    std::shared_ptr<Keyspace> space;
  };

  const char* admit(Client& client, const Request& request);
  const char* dispatch(ConnectionId connection, Client& client, const Request& request);
  const char* refuse(ConnectionId connection, const Request& request, ErrorCode code,
                     std::string_view text, const char* reason);

  void ping(ConnectionId connection, Client& client, uint32_t nonce);
  void put(Keyspace& space, std::string_view key, std::string_view value, ConnectionId owner);
  const char* add(ConnectionId connection, Keyspace& space, const Request& request);
  const char* append(Keyspace& space, const Request& request);
  void compare_set(ConnectionId connection, Keyspace& space, const Request& request);
  const char* barrier(ConnectionId connection, Client& client, const Request& request);
  void check(ConnectionId connection, const Keyspace& space, const Request& request);
  void list_keys(ConnectionId connection, const Keyspace& space);
  void remove(Keyspace& space, std::string_view key);
  void send_values(ConnectionId connection, const Keyspace& space, const Request& request);

  const char* wait(ConnectionId connection, Client& client, const Request& request);
  void await(ConnectionId connection, Client& client);
  void stop_waiting(ConnectionId connection, Client& client);
  void release(Keyspace& space, std::string_view key);
  void found(ConnectionId connection);
  void answer_wait(ConnectionId connection, Client& client);

  void push(Keyspace& space, const Request& request);
  void pop(ConnectionId connection, Keyspace& space, std::string_view key);
  const char* take(ConnectionId connection, Client& client, const Request& request);

  void watch(ConnectionId connection, Keyspace& space, std::string_view prefix);
  void tell(Keyspace& space, EventKind kind, std::string_view key, const Value& value);
  const char* enter(ConnectionId connection, Client& client, const Request& request);
  void fence(Keyspace& space, int64_t by);
  void leave(ConnectionId connection, Keyspace& space);

  Output& reply(ConnectionId connection);
  void send_event(ConnectionId connection, EventKind kind, std::string_view key,
                  const Value& value);

  Outbox& outbox_;
  std::shared_ptr<Keyspace> default_;
  ByName<std::shared_ptr<Keyspace>> rounds_;
  std::vector<Client> clients_;  // by id; ids are small and reused
};

}  // namespace rallypoint::store
