// Runs kernels of another architecture under an emulator. It is linked with them and with `table.c`, and takes jobs
// from stdin: for each the kernel's number, n, work items, items per call, bytes of scratch, number of operands,
// then per operand its size and bytes, or -1 and the operand that it is again, or -2 and a number of matrices before size
// and bytes: the kernel gets a table of their addresses. Writes the operands' bytes back.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef void kernel(uint8_t *const *args, int64_t n, int64_t begin, int64_t end, uint8_t *scratch);
extern kernel *const table[];

#define MOST 16
#define MATRICES 4096

struct guarded {
    uint8_t *base, *start;
    size_t mapped, len;
};

static void expect(int ok, const char *what) {
    if (!ok) {
        fprintf(stderr, "driver: %s\n", what);
        exit(1);
    }
}

// Memory that ends where an unreadable page begins.
static struct guarded guard(size_t len) {
    const size_t page = 65536; // a multiple of every page size
    size_t body = (len + page - 1) / page * page;
    uint8_t *base = mmap(0, body + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    expect(base != MAP_FAILED && mprotect(base + body, page, PROT_NONE) == 0, "no memory");
    return (struct guarded){base, base + body - len, body + page, len};
}

static int64_t number(void) {
    int64_t x;
    return fread(&x, sizeof x, 1, stdin) == 1 ? x : INT64_MIN;
}

int main(void) {
    for (int64_t which; (which = number()) != INT64_MIN;) {
        int64_t n = number(), items = number(), chunk = number(), scratch_bytes = number(), count = number();
        expect(count > 0 && count <= MOST, "operands");
        struct guarded memory[MOST] = {0};
        uint8_t *args[MOST];
        static uint8_t *addresses[MOST][MATRICES];
        for (int64_t i = 0; i < count; i++) {
            int64_t len = number();
            if (len == -1) {
                args[i] = args[number()];
                continue;
            }
            int64_t matrices = len == -2 ? number() : 0;
            len = len == -2 ? number() : len;
            expect(len >= 0 && matrices <= MATRICES, "sizes");
            memory[i] = guard((size_t)len);
            expect(fread(memory[i].start, 1, (size_t)len, stdin) == (size_t)len, "short input");
            for (int64_t m = 0; m < matrices; m++) {
                addresses[i][m] = memory[i].start + len / matrices * m;
            }
            args[i] = matrices ? (uint8_t *)addresses[i] : memory[i].start;
        }
        struct guarded scratch = guard((size_t)scratch_bytes);
        memset(scratch.start, 0xff, scratch.len);
        // A negative chunk: items depend on earlier ones, so the first chunk comes first.
        for (int64_t begin = 0; chunk < 0 && begin < items;) {
            int64_t end = items - begin > -chunk ? begin - chunk : items;
            table[which](args, n, begin, end, scratch.start);
            begin = end;
        }
        for (int64_t end = chunk < 0 ? 0 : items; end > 0;) {
            int64_t begin = end > chunk ? end - chunk : 0;
            table[which](args, n, begin, end, scratch.start);
            end = begin;
        }
        munmap(scratch.base, scratch.mapped);
        for (int64_t i = 0; i < count; i++) {
            if (memory[i].base) {
                expect(fwrite(memory[i].start, 1, memory[i].len, stdout) == memory[i].len, "output");
                munmap(memory[i].base, memory[i].mapped);
            }
        }
    }
    return fflush(stdout) != 0;
}
