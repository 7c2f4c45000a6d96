// SPDX-License-Identifier: Apache-2.0
// Preloaded by lesser_cpu.py: CPUID, which tells a process what its CPU has, tells it of less.
//
// Linux makes the instruction a fault if a process asks for that (arch_prctl(2), ARCH_CPUID). The
// handler executes it, takes bits out of the answer, and goes on behind it. Threads and forks
// inherit that; programs that they start preload this again. What the processor can do is left as
// it is: code that does not ask runs as before.

#define _GNU_SOURCE
#include <cpuid.h>
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

enum { BASELINE, AVX2, AVX512, AVX512_BF16, AMX };
enum { EAX, EBX, ECX, EDX };

static const char* const levels[] = {"baseline", "avx2", "avx512", "avx512_bf16"};

static const struct {
    unsigned leaf, subleaf;
    int where, first_level; // register; the first level that has these bits
    unsigned bits;
} sets[] = {
    {1, 0, ECX, AVX2, 1u << 12 | 1u << 28 | 1u << 29}, // FMA, AVX, F16C
    {7, 0, EBX, AVX2, 1u << 3 | 1u << 5 | 1u << 8},    // BMI1, AVX2, BMI2
    {7, 0, ECX, AVX2, 1u << 9 | 1u << 10},             // VAES, VPCLMULQDQ
    {0x80000001, 0, ECX, AVX2, 1u << 5},               // LZCNT
    // F, DQ, IFMA, PF, ER, CD, BW, VL
    {7, 0, EBX, AVX512, 1u << 16 | 1u << 17 | 1u << 21 | 0xFu << 26 | 3u << 30},
    {7, 0, ECX, AVX512, 1u << 1 | 1u << 6 | 1u << 11 | 1u << 12 | 1u << 14}, // VBMI to VPOPCNTDQ
    {7, 0, EDX, AVX512, 1u << 2 | 1u << 3 | 1u << 8}, // 4VNNIW, 4FMAPS, VP2INTERSECT
    // In vectors of AVX, but younger than AVX-512: VNNI, IFMA, VNNI-INT8, NE-CONVERT, VNNI-INT16
    {7, 1, EAX, AVX512_BF16, 1u << 4 | 1u << 23},
    {7, 1, EDX, AVX512_BF16, 1u << 4 | 1u << 5 | 1u << 10},
    {7, 1, EAX, AVX512_BF16, 1u << 5},               // AVX512_BF16
    {7, 0, EDX, AMX, 1u << 23},                      // AVX512_FP16
    {7, 1, EDX, AMX, 1u << 19},                      // AVX10
    {7, 0, EDX, AMX, 1u << 22 | 1u << 24 | 1u << 25}, // AMX BF16, TILE, INT8
    {7, 1, EAX, AMX, 1u << 21},                      // AMX FP16
    {7, 1, EDX, AMX, 1u << 8},                       // AMX COMPLEX
};

static int level;
static struct sigaction others; // what the process itself does with SIGSEGV
static int (*set_action)(int, const struct sigaction*, struct sigaction*);

static int allow_cpuid(int allowed)
{
    enum { ARCH_CPUID = 0x1012 };
    return (int)syscall(SYS_arch_prctl, ARCH_CPUID, (long)allowed);
}

static void answer(greg_t* registers)
{
    unsigned leaf = (unsigned)registers[REG_RAX], subleaf = (unsigned)registers[REG_RCX];
    unsigned found[4];
    allow_cpuid(1);
    __cpuid_count(leaf, subleaf, found[EAX], found[EBX], found[ECX], found[EDX]);
    allow_cpuid(0);
    for (size_t i = 0; i < sizeof sets / sizeof *sets; i++) {
        int asked = sets[i].leaf == leaf && (leaf != 7 || sets[i].subleaf == subleaf);
        if (asked && level < sets[i].first_level)
            found[sets[i].where] &= ~sets[i].bits;
    }
    registers[REG_RAX] = found[EAX];
    registers[REG_RBX] = found[EBX];
    registers[REG_RCX] = found[ECX];
    registers[REG_RDX] = found[EDX];
    registers[REG_RIP] += 2;
}

static void on_fault(int number, siginfo_t* info, void* context)
{
    greg_t* registers = ((ucontext_t*)context)->uc_mcontext.gregs;
    // A general protection fault: the code can be read, else it were a page fault.
    if (info->si_code == SI_KERNEL && !memcmp((void*)registers[REG_RIP], "\x0F\xA2", 2)) {
        answer(registers);
    } else if (others.sa_flags & SA_SIGINFO) {
        others.sa_sigaction(number, info, context);
    } else if (others.sa_handler != SIG_DFL && others.sa_handler != SIG_IGN) {
        others.sa_handler(number);
    } else {
        set_action(SIGSEGV, &others, NULL); // and fault again
    }
}

// Handlers of SIGSEGV, Python's faulthandler among them, are called for what is no CPUID.

int sigaction(int number, const struct sigaction* action, struct sigaction* before)
{
    if (!set_action)
        set_action = dlsym(RTLD_NEXT, "sigaction");
    if (number != SIGSEGV)
        return set_action(number, action, before);
    struct sigaction now = others;
    if (action)
        others = *action;
    if (before)
        *before = now;
    return 0;
}

sighandler_t signal(int number, sighandler_t handler)
{
    struct sigaction action = {.sa_handler = handler, .sa_flags = SA_RESTART}, before;
    return sigaction(number, &action, &before) ? SIG_ERR : before.sa_handler;
}

__attribute__((constructor)) static void start(void)
{
    const char* name = getenv("SEGREUSE_LESSER_CPU");
    while (level < AMX && (!name || strcmp(levels[level], name)))
        level++;
    if (!set_action)
        set_action = dlsym(RTLD_NEXT, "sigaction");
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER};
    if (level == AMX || set_action(SIGSEGV, &action, &others) || allow_cpuid(0)) {
        fprintf(stderr, "lesser_cpu: cannot pass for a CPU with %s\n", name ? name : "(nothing)");
        _exit(70);
    }
}
