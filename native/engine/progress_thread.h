// The thread that carries out operations while their callers do something else: one for all
// communicators of the process, started when first needed, asleep while there is nothing to do.
//
// It knows neither operations nor Python: it asks each communicator to make progress, and sleeps on
// the bells of those that wait for a peer.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "engine/region.h"

namespace rallypoint {

// An object that the thread serves.
class Progressable {
 public:
  virtual ~Progressable() = default;
  virtual bool has_work() const = 0;
  // Whether there are more ranks on this host than cores.
  virtual bool shares_cores() const = 0;
  // Makes progress without waiting; returns whether anything moved. With `has_slept`, it looks for
  // trouble.
  virtual bool progress(bool has_slept) = 0;
  virtual const Region& region() const = 0;
  // Make the bell ring also for messages from other hosts.
  virtual void arm() = 0;
};

class ProgressThread {
 public:
  static ProgressThread& instance();
  ProgressThread() = default;

  void add(Progressable& member);
  // After this call the thread does not touch the member any more.
  void remove(Progressable& member);
  // There is work: to be done at once, or when the thread next checks, within a millisecond.
  void notify(bool immediately);

 private:
  class Visit {
   public:
    explicit Visit(ProgressThread& progress);
    ~Visit();
    Visit(const Visit&) = delete;
    Visit& operator=(const Visit&) = delete;

   private:
    ProgressThread& progress_;
  };

  void run();
  // Lets all members make progress; `patience`: how often to yield if nothing has moved; 0 if there
  // is no work.
  bool pass(bool has_slept, unsigned& patience);
  void sleep(std::uint32_t calls, long most_us);

  std::mutex mutex_;  // of members_
  std::vector<Progressable*> members_;
  bool is_running_ = false;
  std::atomic<unsigned> visitors_{0};
  std::atomic<std::uint32_t> calls_{0};  // the futex of the thread
  std::atomic<bool> is_asleep_{false};   // until it is called
};

}  // namespace rallypoint
