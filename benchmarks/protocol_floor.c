/* The physical floor of a round trip: two processes, one shared page each way, spin on a counter, one memcpy per side.
   Usage: protocol_floor BYTES COUNT; prints nanoseconds, one per line. */
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

struct ring {
    _Alignas(64) atomic_ulong counter;
    _Alignas(64) char body[];
};

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void wait_for(struct ring *ring, unsigned long value) {
    for (unsigned spins = 1; atomic_load_explicit(&ring->counter, memory_order_acquire) != value; ++spins)
        if (spins % 256 == 0) sched_yield();
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    const size_t bytes = strtoul(argv[1], NULL, 10);
    const unsigned long count = strtoul(argv[2], NULL, 10);
    const size_t room = sizeof(struct ring) + bytes + 64;
    struct ring *rings[2];
    for (int i = 0; i < 2; ++i) {
        rings[i] = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (rings[i] == MAP_FAILED) return 1;
        memset(rings[i], 0, room);
    }
    char *host = malloc(bytes + 1);
    memset(host, 1, bytes + 1);
    const pid_t device = fork();
    if (device == 0) { /* reads the request where it lies, writes the answer: one memcpy */
        for (unsigned long i = 1; i <= count; ++i) {
            wait_for(rings[0], i);
            memcpy(rings[1]->body, rings[0]->body, bytes);
            atomic_store_explicit(&rings[1]->counter, i, memory_order_release);
        }
        _exit(0);
    }
    uint64_t *times = malloc(count * sizeof *times);
    for (unsigned long i = 1; i <= count; ++i) { /* writes the request, reads the answer where it lies: one memcpy */
        const uint64_t start = now_ns();
        memcpy(rings[0]->body, host, bytes);
        atomic_store_explicit(&rings[0]->counter, i, memory_order_release);
        wait_for(rings[1], i);
        times[i - 1] = now_ns() - start;
    }
    waitpid(device, NULL, 0);
    for (unsigned long i = 0; i < count; ++i) printf("%lu\n", (unsigned long)times[i]);
    return 0;
}
