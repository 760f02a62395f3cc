; c[i] = a[i] + b[i] for i < n; one thread an element.
target triple = "nvptx64-nvidia-cuda"

declare i32 @llvm.nvvm.read.ptx.sreg.tid.x()
declare i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()
declare i32 @llvm.nvvm.read.ptx.sreg.ntid.x()

define ptx_kernel void @vector_add(ptr addrspace(1) noalias readonly %a, ptr addrspace(1) noalias readonly %b, ptr addrspace(1) noalias %c, i32 %n) {
entry:
  %tid = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %block = call i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()
  %threads = call i32 @llvm.nvvm.read.ptx.sreg.ntid.x()
  %first = mul i32 %block, %threads
  %i = add i32 %first, %tid
  %inside = icmp ult i32 %i, %n
  br i1 %inside, label %add, label %end
add:
  %wide = zext i32 %i to i64
  %pa = getelementptr float, ptr addrspace(1) %a, i64 %wide
  %pb = getelementptr float, ptr addrspace(1) %b, i64 %wide
  %pc = getelementptr float, ptr addrspace(1) %c, i64 %wide
  %x = load float, ptr addrspace(1) %pa
  %y = load float, ptr addrspace(1) %pb
  %sum = fadd float %x, %y
  store float %sum, ptr addrspace(1) %pc
  br label %end
end:
  ret void
}
