// Threads that Python knows nothing of, and that call a function as C code does: without the GIL, over and over, until
// the process is gone. Where they stand is told on the way out, when the interpreter is gone already.
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

typedef int (*Function)(int64_t);

static atomic_long answers[3];

static __attribute__((noreturn)) void* call(void* function) {
  for (;;) {
    const int answer = ((Function)function)(-1);
    atomic_fetch_add(&answers[answer == 0 || answer == 2 ? answer : 1], 1);
    usleep(20);
  }
}

long answered(int answer) { return answers[answer]; }

static void tell(void) {
  const long before = answers[2];
  while (answers[2] < before + 100) usleep(100);
  printf("others %ld, and %s\n", (long)answers[1], answers[0] ? "some were taken" : "none was taken");
  fflush(stdout);
}

void start(Function function, int threads) {
  atexit(tell);
  for (int each = 0; each < threads; ++each) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, call, (void*)function) != 0) abort();
  }
}
