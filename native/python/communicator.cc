#include "python/communicator.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "engine/collective.h"
#include "engine/tcp/transports.h"
#include "python/work.h"

namespace nb = nanobind;

namespace rallypoint::python {
namespace {

constexpr std::uint64_t kLongBytes = 32 << 10;  // from here on, other threads may run meanwhile
constexpr std::uint64_t kLongTransferBytes = 512 << 10;  // one copy, about 10 us
constexpr std::uint32_t kVariant = 1 << 8;  // process_group/planning.py: above, which algorithm

bool overlap(const View& one, const View& other) {
  return one.data() < other.data() + other.bytes() && other.data() < one.data() + one.bytes();
}

std::vector<tcp::PeerAddress> addresses_of(const std::vector<FarPeer>& peers) {
  std::vector<tcp::PeerAddress> all;
  for (const auto& [rank, pid, control, mail, data] : peers) {
    all.push_back({rank, pid, control, mail, data});
  }
  return all;
}

MakeTransports late_transports(const Mesh& given) {
  const auto& [listener, secret, name, streams, usual, of_long_ways, silence_s, endpoints,
               neighbours] = given;
  tcp::LateMesh mesh{
      listener, {{secret.c_str(), secret.size()}, name}, streams, usual, of_long_ways, silence_s,
      {}};
  for (const auto& [rank, address, port] : endpoints) {
    mesh.endpoints.push_back({rank, address, port});
  }
  std::vector<tcp::PeerAddress> controlled;
  for (const auto& [rank, control] : neighbours) controlled.push_back({rank, 0, control, -1, {}});
  return tcp::late_transports_to(std::move(controlled), std::move(mesh));
}

Communicator* make(int fd, std::uint32_t rank, std::uint32_t ranks, WaitPolicy policy,
                   const std::vector<FarPeer>& peers, const std::string& description,
                   const std::optional<Mesh>& mesh) {
  const std::vector<tcp::PeerAddress> addresses = addresses_of(peers);
  return new Communicator(fd, rank, ranks, policy, tcp::ranks_of(addresses),
                          mesh ? late_transports(*mesh) : tcp::transports_to(addresses),
                          description);
}

// A forked child says nothing to its parent's peers, and has none of its parent's threads. Leaving
// may take seconds, if peers are slow to read what was sent to them.
void let_go(Communicator* communicator) {
  if (communicator->is_parents()) return;
  const WithoutGil others_run;
  delete communicator;
}

bool needs_factor(std::uint32_t op) { return static_cast<ReduceOp>(op) == ReduceOp::premul_sum; }

bool applies(std::uint32_t op, DType dtype) {
  return op == 0 || reducer(dtype, static_cast<ReduceOp>(op)) != nullptr;
}

Operator operator_of(std::uint32_t collective, std::uint32_t op, std::uint32_t root, DType dtype) {
  return {static_cast<std::uint16_t>(collective % kVariant), dtype, static_cast<ReduceOp>(op),
          static_cast<std::int32_t>(root)};
}

std::optional<DType> common_dtype(const View& source, const View& target) {
  if (!source.is_good() || !target.is_good()) return {};
  if (source.is_none()) return target.is_none() ? DType::uint8 : target.dtype();
  if (target.is_none() || target.dtype() == source.dtype()) return source.dtype();
  return {};
}

// The size by which programs are chosen: the same on every rank, whether or not it is the root.
std::uint64_t common_bytes(std::uint64_t input, std::uint64_t output) {
  return input == 0 || output == 0 ? input + output : std::min(input, output);
}

std::uint64_t block_bytes(const Program& program, std::uint64_t input, std::uint64_t output) {
  return program.output_blocks > 0 ? output / program.output_blocks
                                   : input / std::max(program.input_blocks, 1u);
}

// A buffer that the program does not use may be anything.
bool holds(const View& view, std::uint64_t blocks, std::uint64_t block) {
  return blocks == 0 || view.bytes() == blocks * block;
}

nb::list circle(const Poison& poison) {
  nb::list members;
  for (std::uint32_t i = 0; i < std::min(poison.circle_size, kMostInCircle); ++i) {
    const CircleMember& member = poison.circle[i];
    members.append(nb::make_tuple(member.rank, member.sends != 0, member.peer, member.tag));
  }
  return members;
}

nb::object record(const CallRecord& record) {
  const std::uint64_t number = record.number.load();
  if (number == 0) return nb::none();
  const std::int32_t what[] = {record.collective, record.reduce_op, record.dtype, record.root};
  return nb::make_tuple(number - 1, what[0], what[1], what[2], what[3],
                        std::uint64_t{record.count});
}

View view_of(nb::handle array, bool writable) {
  View view(array, writable);
  if (!view.is_good() || view.is_none()) throw nb::value_error("not an array in plain memory");
  return view;
}

}  // namespace

nb::bytes addresses_of(nb::list arrays) {
  std::vector<std::uint64_t> all;
  for (const nb::handle array : arrays) {
    all.push_back(reinterpret_cast<std::uint64_t>(view_of(array, false).data()));
  }
  return nb::bytes(all.data(), all.size() * sizeof(std::uint64_t));
}

PythonCommunicator::PythonCommunicator(int fd, std::uint32_t rank, std::uint32_t ranks,
                                       unsigned spins, unsigned yields, nb::callable plan,
                                       double timeout_s, nb::callable is_alone,
                                       bool synchronous_send, const std::vector<FarPeer>& peers,
                                       const std::string& description, nb::callable site,
                                       const std::optional<Mesh>& mesh)
    : communicator_(make(fd, rank, ranks, WaitPolicy{spins, yields}, peers, description, mesh),
                    let_go),
      plan_(std::move(plan)),
      is_alone_(std::move(is_alone)),
      site_(std::move(site)),
      timeout_s_(timeout_s),
      synchronous_send_(synchronous_send) {}

void PythonCommunicator::set_reach(PeerMemoryAccess reach, bool knows_itself) {
  communicator_->memory().knows_itself = knows_itself;
  communicator_->memory().reach = reach;
}

bool PythonCommunicator::read_memory(std::uint32_t rank, nb::bytes addresses, nb::list arrays) {
  if (rank >= ranks() || addresses.size() != arrays.size() * sizeof(std::uint64_t)) {
    throw nb::value_error("there must be an address of that rank for each array");
  }
  std::vector<View> views;
  std::vector<RemotePart> parts;
  for (const nb::handle array : arrays) {
    const View& view = views.emplace_back(view_of(array, true));
    std::uint64_t address;
    std::memcpy(&address, addresses.c_str() + parts.size() * sizeof address, sizeof address);
    parts.push_back({address, view.data(), view.bytes()});
  }
  const WithoutGil others_run;
  return communicator_->memory().read(rank, parts) == Trouble::none;
}

int PythonCommunicator::run(std::uint32_t collective, std::uint32_t op, std::uint32_t root,
                            nb::handle input, nb::handle output, double timeout_s) {
  if (is_held_) return kBadBuffer;
  const View target(output, true);
  if (input.is(output)) return run(collective, op, root, target, target, timeout_s);
  return run(collective, op, root, View(input, false), target, timeout_s);
}

int PythonCommunicator::run_apart(std::uint32_t collective, std::uint32_t op, std::uint32_t root,
                                  nb::handle input, nb::handle output, double timeout_s) {
  if (is_held_) return kBadBuffer;
  const bool many_in = PyList_CheckExact(input.ptr());
  const bool many_out = PyList_CheckExact(output.ptr());
  if (many_in && many_out) return run_lists(collective, op, root, input, output, timeout_s);
  if (many_in) return run_list(collective, op, root, input, output, true, timeout_s);
  if (many_out) return run_list(collective, op, root, output, input, false, timeout_s);
  const View source(input, false);
  const View target(output, true);
  if (overlap(source, target)) return kBadBuffer;
  return run(collective, op, root, source, target, timeout_s);
}

int PythonCommunicator::run_cut(std::uint32_t collective, const Cut& input, const Cut& output,
                                double timeout_s) {
  if (is_held_) return kBadBuffer;
  Arguments given;
  const bool is_good = given.take(input.array, output.array, {}, false) &&
                       given.cut(given.inputs, input.sizes, input.rows) &&
                       given.cut(given.outputs, output.sizes, output.rows);
  return is_good ? run_uneven(given, collective, 0, 0, timeout_s) : kBadBuffer;
}

nb::object PythonCommunicator::submit(std::uint32_t collective, std::uint32_t op,
                                      std::uint32_t root, nb::handle input, nb::handle output,
                                      int as, double factor, bool uneven, double timeout_s,
                                      bool plain, bool in_place, bool waits) {
  const Releasing releasing;
  const auto work = std::make_shared<PythonWork>();
  std::optional<DType> dtype;
  if (as >= 0) dtype = static_cast<DType>(as);
  if (!work->take(input, output, dtype, plain)) return nb::int_(kBadBuffer);
  if (plain) {
    if (needs_factor(op)) return nb::int_(kBadBuffer);
    uneven = PyList_CheckExact(input.ptr()) && PyList_CheckExact(output.ptr());
    const bool is_one = in_place && input.is(output);
    if (!is_one && !is_plain(*work, uneven)) return nb::int_(kBadBuffer);
  }
  std::uint64_t bytes = 0;
  const int code = prepare(*work, collective, op, root, factor, uneven, bytes);
  if (code != 0) return nb::int_(code);
  work->call.timeout_s = limit(timeout_s);
  work->communicator = communicator_;
  work->site = site_;
  PythonHost host(&site_);
  ++begun_;
  if (bytes >= kLongBytes) host.before_wait();
  const bool begun = communicator_->submit(work->call, work, bytes >= kLongBytes, host);
  if (begun && waits) communicator_->finish(*work, host);
  host.finish();
  return nb::cast(work);
}

int PythonCommunicator::send(std::uint32_t to, std::int32_t tag, nb::handle buffer,
                             double timeout_s) {
  if (is_held_) return kBadBuffer;
  const View view(buffer, false);
  Transfer transfer;
  if (!fill(transfer, true, static_cast<int>(to), tag, view, limit(timeout_s))) return kBadBuffer;
  return static_cast<int>(carry_out(transfer));
}

int PythonCommunicator::receive(int from, std::int32_t tag, nb::handle buffer, double timeout_s) {
  if (is_held_) return kBadBuffer;
  const View view(buffer, true);
  Transfer transfer;
  if (!fill(transfer, false, from, tag, view, limit(timeout_s))) return kBadBuffer;
  const Trouble trouble = carry_out(transfer);
  if (trouble != Trouble::none) return kFailed - static_cast<int>(trouble);
  return static_cast<int>(transfer.peer);
}

nb::object PythonCommunicator::post(bool sends, int peer, std::int32_t tag, nb::handle buffer,
                                    int as, double timeout_s, bool plain) {
  refuse_among_others();
  const Releasing releasing;
  const auto work = std::make_shared<PythonWork>();
  std::optional<DType> dtype;
  if (as >= 0) dtype = static_cast<DType>(as);
  View view(buffer, !sends, dtype, plain);
  work->is_transfer = true;
  if (!fill(work->transfer, sends, peer, tag, view, limit(timeout_s))) {
    return nb::int_(kBadBuffer);
  }
  work->views.push_back(std::move(view));
  work->communicator = communicator_;
  work->is_alone = is_alone_;
  work->site = site_;
  if (!communicator_->post(work->transfer, work)) return nb::int_(kTooMany);
  return nb::cast(work);
}

nb::object PythonCommunicator::trouble() {
  Region& region = communicator_->region();
  if (!region.poisoned()) return nb::none();
  bool is_complete = false;
  {
    const WithoutGil released;
    is_complete = region.await_details();
  }
  static const Poison none{};
  const Poison& poison = is_complete ? region.poison() : none;
  const Blame blame = region.blame();
  return nb::make_tuple(static_cast<int>(blame.trouble), blame.culprit, blame.reporter, is_complete,
                        record(poison.theirs), record(poison.ours), poison.sent, poison.expected,
                        circle(poison), poison.timeout_s);
}

void PythonCommunicator::leave() {
  if (!communicator_->is_parents()) communicator_->leave();
}

void PythonCommunicator::abort() {
  if (communicator_->is_parents()) return;
  Region& region = communicator_->region();
  region.spread(Trouble::aborted, static_cast<std::int32_t>(region.rank()), nullptr, nullptr);
}

void PythonCommunicator::revoke() {
  if (!communicator_->is_parents()) communicator_->revoke();
}

bool PythonCommunicator::end_calls(double most_s) {
  return communicator_->is_parents() || communicator_->end_calls(most_s);
}

int PythonCommunicator::run(std::uint32_t collective, std::uint32_t op, std::uint32_t root,
                            const View& source, const View& target, double timeout_s) {
  const std::optional<DType> dtype = common_dtype(source, target);
  if (!dtype || op >= kReduceOps || needs_factor(op)) return kBadBuffer;
  if (!applies(op, *dtype)) return kBadOperator;
  const std::uint64_t bytes = common_bytes(source.bytes(), target.bytes());
  const Program& program = planned(collective, root, bytes, false);
  const std::uint64_t block = block_bytes(program, source.bytes(), target.bytes());
  if (!holds(source, program.input_blocks, block) || !holds(target, program.output_blocks, block) ||
      block % item_bytes(*dtype) != 0) {
    return kBadBuffer;
  }
  return carry_out({&program, operator_of(collective, op, root, *dtype), block / item_bytes(*dtype),
                    source.data(), target.data(), limit(timeout_s)},
                   bytes);
}

int PythonCommunicator::run_list(std::uint32_t collective, std::uint32_t op, std::uint32_t root,
                                 nb::handle arrays, nb::handle single, bool is_input,
                                 double timeout_s) {
  const View view(single, is_input);
  if (!view.dtype() || op >= kReduceOps || needs_factor(op)) return kBadBuffer;
  if (!applies(op, *view.dtype())) return kBadOperator;
  const std::uint64_t items = view.bytes() / item_bytes(*view.dtype());
  std::vector<View> views;
  std::vector<Block> blocks;
  views.reserve(nb::len(arrays));
  blocks.reserve(views.capacity());
  for (nb::handle array : nb::borrow<nb::list>(arrays)) {
    if (Py_TYPE(array.ptr()) != Py_TYPE(single.ptr())) return kBadBuffer;
    const View& added = views.emplace_back(array, !is_input);
    if (added.dtype() != view.dtype() || added.bytes() != view.bytes() || overlap(added, view)) {
      return kBadBuffer;
    }
    blocks.push_back({added.data(), items});
  }
  const Program& program = planned(collective, root, view.bytes(), false);
  const std::uint32_t listed = is_input ? program.input_blocks : program.output_blocks;
  const std::uint32_t others = is_input ? program.output_blocks : program.input_blocks;
  if (blocks.empty() || blocks.size() != listed || others != 1) return kBadBuffer;
  const auto [input, output] =
      is_input ? std::pair(blocks[0].at, view.data()) : std::pair(view.data(), blocks[0].at);
  Call call{&program,        operator_of(collective, op, root, *view.dtype()), items, input, output,
            limit(timeout_s)};
  (is_input ? call.input_blocks : call.output_blocks) = blocks.data();
  return carry_out(call, view.bytes() * listed);
}

int PythonCommunicator::run_lists(std::uint32_t collective, std::uint32_t op, std::uint32_t root,
                                  nb::handle input, nb::handle output, double timeout_s) {
  Arguments given;
  if (!given.take(input, output, {}, false)) return kBadBuffer;
  return run_uneven(given, collective, op, root, timeout_s);
}

int PythonCommunicator::run_uneven(Arguments& given, std::uint32_t collective, std::uint32_t op,
                                   std::uint32_t root, double timeout_s) {
  if (!is_plain(given, true)) return kBadBuffer;
  std::uint64_t bytes = 0;
  const int code = prepare(given, collective, op, root, 1, true, bytes);
  if (code != 0) return code;
  given.call.timeout_s = limit(timeout_s);
  return carry_out(given.call, std::max(given.input_bytes(), given.output_bytes()));
}

bool PythonCommunicator::is_plain(const Arguments& given, bool uneven) const {
  const std::uint32_t rank = communicator_->region().rank();
  const auto& [inputs, outputs] = std::tie(given.inputs, given.outputs);
  if (!given.are_apart()) return false;
  if (!uneven) return !given.differ();
  // Peers detect what does not fit theirs; for what stays here there is nobody else.
  return rank < inputs.size() && rank < outputs.size() && inputs[rank].items == outputs[rank].items;
}

int PythonCommunicator::prepare(Arguments& given, std::uint32_t collective, std::uint32_t op,
                                std::uint32_t root, double factor, bool uneven,
                                std::uint64_t& bytes) {
  if (op >= kReduceOps) return kBadBuffer;
  if (!applies(op, *given.dtype)) return kBadOperator;
  uneven |= given.differ();
  const std::uint64_t input = given.input_bytes();
  const std::uint64_t output = given.output_bytes();
  bytes = common_bytes(input, output);
  const Program& program = planned(collective, root, uneven ? 0 : bytes, uneven);
  if (uneven && !program.takes_uneven_blocks()) return kBadBuffer;
  Call& call = given.call;
  call.what = operator_of(collective, op, root, *given.dtype);
  if (uneven) {
    call.agreement = &planned(collective::kAllReduce, 0, sizeof(std::int64_t), false);
    call.count = given.largest();
  } else {
    call.count = block_bytes(program, input, output) / item_bytes(*given.dtype);
  }
  if (!given.fit(program, uneven)) return kBadBuffer;
  return needs_factor(op) && !given.premultiply(factor) ? kBadOperator : 0;
}

int PythonCommunicator::carry_out(const Call& call, std::uint64_t bytes) {
  PythonHost host(&site_);
  ++begun_;
  if (bytes >= kLongBytes) host.before_wait();
  const Trouble trouble = communicator_->run(call, host);
  host.finish();
  return static_cast<int>(trouble);
}

bool PythonCommunicator::fill(Transfer& transfer, bool sends, int peer, std::int32_t tag,
                              const View& view, double timeout_s) const {
  if (!view.dtype()) return false;
  transfer.sends = sends;
  transfer.is_synchronous = sends && synchronous_send_;
  transfer.peer = peer < 0 ? kAnyRank : static_cast<std::uint32_t>(peer);
  transfer.tag = tag;
  transfer.dtype = *view.dtype();
  transfer.data = view.data();
  transfer.bytes = view.bytes();
  transfer.timeout_s = timeout_s;
  return peer < static_cast<int>(communicator_->region().ranks()) && (peer >= 0 || !sends);
}

Trouble PythonCommunicator::carry_out(Transfer& transfer) {
  PythonHost host(&site_, &is_alone_);
  if (transfer.bytes >= kLongTransferBytes) host.before_wait();
  const Trouble trouble = communicator_->transfer(transfer, host);
  host.finish();
  return trouble;
}

const Program& PythonCommunicator::planned(std::uint32_t collective, std::uint32_t root,
                                           std::uint64_t bytes, bool uneven) {
  const std::uint64_t kind = Communicator::kind(collective, root, bytes, uneven);
  if (const Program* known = communicator_->find(kind)) return *known;
  const auto answer = nb::cast<nb::tuple>(plan_(collective, root, bytes, uneven));
  const auto words = nb::cast<nb::bytes>(answer[0]);
  const std::string error = communicator_->teach(
      kind, {static_cast<const std::int32_t*>(words.data()), words.size() / sizeof(std::int32_t)},
      communicator_->region().rank(), communicator_->region().ranks(), nb::cast<bool>(answer[1]));
  if (!error.empty()) throw nb::value_error(error.c_str());
  return *communicator_->find(kind);
}

}  // namespace rallypoint::python
